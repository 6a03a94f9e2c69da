"""Tool calls between tags: as JSON (Qwen, Hermes) or as their own tags (Qwen3-Coder, GLM)."""

import re
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from telescope_core.parsers.tool_calls import (
    CLOSING,
    OPENING,
    CallText,
    decode_json,
    tagged_blocks,
)
from telescope_train.chat.formats.reply import Block, Calls, ToolCallParser, ToolSchemas, cut_out
from telescope_train.chat.formats.typed import typed_call

_OPEN, _CLOSE = _TAGS = (OPENING, CLOSING)
_SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION_OF_JSON = re.compile(r"<function=(?P<name>[^>\n]+)>\s*")


class _Shape(NamedTuple):
    """The patterns of a call with keys and values; the three match one after the other."""

    head: re.Pattern[str]
    """Up to the first key, with the group `name`, and `opening` if the tag may be missing."""
    pair: re.Pattern[str]
    """One key and its value."""
    tail: re.Pattern[str]
    """The end of the call, with the group `closing` if the end alone shows that a call was meant. A
    call that was cut does not count, because an argument may be missing."""


def _qwen3_coder(opening: str, closing: str) -> _Shape:
    end = rf"(?P<closing></function>)\s*(?:{closing})?|{closing}|(?={opening}|<function=)"
    return _Shape(
        head=re.compile(rf"(?P<opening>{opening}\s*)?<function=(?P<name>[^>\n]+)>"),
        pair=re.compile(
            r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?"
            rf"(?:</parameter>|(?=<parameter=|</function>\s*(?:{closing}|\Z)))",
            re.DOTALL,
        ),
        tail=re.compile(rf"\s*(?:{end})"),
    )


_GLM45 = _Shape(
    head=re.compile(rf"(?P<opening>{_OPEN})\s*(?P<name>[^\s<]+)"),
    pair=re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    tail=re.compile(rf"\s*(?:(?P<closing>{_CLOSE})|(?={_OPEN}))"),
)


def read_hermes(text: str, tools: ToolSchemas) -> Calls:
    """Read `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them."""
    return cut_out(text, (Block(one.start, one.end, one.calls) for one in tagged_blocks(text)))


def read_pairs(text: str, tools: ToolSchemas, *, shape: _Shape) -> Calls:
    """Read calls whose arguments are tags of keys and values, typed by the schemas of `tools`."""
    return cut_out(text, _written_in(shape, text, tools))


def read_functionary(text: str, tools: ToolSchemas) -> Calls:
    """Read `<function=NAME>{...}</function>`, any number of them."""
    return cut_out(text, _named_blocks(text))


def _written_in(shape: _Shape, text: str, tools: ToolSchemas) -> Iterator[Block]:
    """Yield the calls; values are read first, because one may contain a closing tag."""
    position = 0
    while (head := shape.head.search(text, position)) is not None:
        pairs: list[tuple[str, str]] = []
        position = head.end()
        while (pair := shape.pair.match(text, position)) is not None:
            pairs.append((pair[1].strip(), pair[2]))
            position = pair.end()
        tail = shape.tail.match(text, position)
        if tail is not None and (pairs or head["opening"] or tail["closing"]):
            position = tail.end()
            call = typed_call(head["name"].strip(), pairs, tools)
            yield Block(head.start(), position, (call,))


def _named_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks; arguments that are not JSON are kept as they were written."""
    position = 0
    while (match := _FUNCTION_OF_JSON.search(text, position)) is not None:
        try:
            _, stop = decode_json(text, match.end())
        except ValueError:
            stop = match.end()
        closing = text.find("</function>", stop)
        end = closing if closing >= 0 else len(text)
        position = min(len(text), end + len("</function>"))
        call = CallText(match["name"].strip(), text[match.end() : end].strip())
        yield Block(match.start(), position, (call,))


HERMES = ToolCallParser(name="hermes", read=read_hermes, marks=(_OPEN, _CLOSE))
QWEN3_CODER = ToolCallParser(
    name="qwen3_coder", read=partial(read_pairs, shape=_qwen3_coder(*_TAGS)), marks=_TAGS
)
"""`<function=NAME><parameter=KEY>VALUE</parameter></function>` between the tags or without."""
SEED_OSS = ToolCallParser(
    name="seed_oss", read=partial(read_pairs, shape=_qwen3_coder(*_SEED_TAGS)), marks=_SEED_TAGS
)
FUNCTIONARY = ToolCallParser(name="functionary", read=read_functionary)
GLM45 = ToolCallParser(
    name="glm45",
    read=partial(read_pairs, shape=_GLM45),
    marks=(_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` between the tags."""
