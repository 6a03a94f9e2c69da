"""Tool calls between tags: as JSON (Qwen, Hermes), as their own tags (Qwen3-Coder, MiniMax)."""

import re
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import (
    CLOSING,
    OPENING,
    CallText,
    decode_json,
    dump_json,
    tagged_blocks,
)
from telescope_train.chat.formats.reply import Block, Calls, ToolCallParser, ToolSchemas, cut_out
from telescope_train.chat.formats.typed import text_or_json, typed_call, unwrapped

_OPEN, _CLOSE = _TAGS = (OPENING, CLOSING)
_SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION_OF_JSON = re.compile(r"<function=(?P<name>[^>\n]+)>\s*")
_DSML = "\uff5cDSML\uff5c"
_NAME = re.compile(r'\bname="([^"]*)"')
_IS_STRING = re.compile(r'\bstring="(true|false)"')


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


def read_invoked(text: str, tools: ToolSchemas, *, call: str, value: str, around: str) -> Calls:
    """Read `<CALL name="..."><VALUE name="...">...</VALUE></CALL>`, any number of them.

    `call` and `value` are names of tags; `around` is a pattern of the tags around all calls.
    """
    block = re.compile(rf"<{call}\b([^>]*)>(.*?)(?:</{call}>|\Z)", re.DOTALL)
    found = (
        Block(*one.span(), _calls(one[1], one[2], value, tools)) for one in block.finditer(text)
    )
    return cut_out(text, found, around=around)


def _calls(attributes: str, body: str, value: str, tools: ToolSchemas) -> list[CallText]:
    """Return the call of a block; none if something in it is not a value with a name."""
    name = _NAME.search(attributes)
    pattern = re.compile(rf"<{value}\b([^>]*)>(.*?)</{value}>", re.DOTALL)
    if name is None or not name[1] or pattern.sub("", body).strip():
        return []
    pairs: list[tuple[str, str]] = []
    declared: dict[str, JsonValue] = {}
    for match in pattern.finditer(body):
        key, is_string = _NAME.search(match[1]), _IS_STRING.search(match[1])
        if key is None:
            return []
        pairs.append((key[1], unwrapped(match[2])))
        if is_string is not None:
            declared[key[1]] = text_or_json(match[2], is_text=is_string[1] == "true")
    if declared and len(declared) == len(pairs):
        return [CallText(name[1], dump_json(declared))]
    return [typed_call(name[1], pairs, tools)]


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
MINIMAX_M2 = ToolCallParser(
    name="minimax_m2",
    read=partial(read_invoked, call="invoke", value="parameter", around=r"</?minimax:tool_call>"),
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
DEEPSEEK_V32 = ToolCallParser(
    name="deepseek_v32",
    read=partial(
        read_invoked,
        call=f"{_DSML}invoke",
        value=f"{_DSML}parameter",
        around=f"</?{_DSML}(?:function_calls|tool_calls)>",
    ),
    marks=(_DSML,),
)
MINICPM5 = ToolCallParser(
    name="minicpm5", read=partial(read_invoked, call="function", value="param", around=r"(?!)")
)
