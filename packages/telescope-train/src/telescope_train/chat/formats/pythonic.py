"""Tool calls as a Python list: `[NAME(KEY=VALUE, ...), ...]`, as Llama and LFM2 write them.

A value is a Python or JSON literal. A bare word is text, because templates write texts so. A reply
of Llama is a list as a whole; LFM2 puts the list between marks.
"""

import ast
import re
import warnings

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import CallText, dump_json, load_json
from telescope_train.chat.formats.reply import (
    Block,
    Calls,
    ToolCallParser,
    ToolSchemas,
    cut_out,
    functions_of,
)
from telescope_train.chat.formats.typed import retyped

_PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
_LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
_BETWEEN = re.compile(
    rf"{re.escape(_LFM2_MARKS[0])}(.*?)(?:{re.escape(_LFM2_MARKS[1])}|\Z)", re.DOTALL
)
_ONE = re.compile(r"\[?\s*(?P<name>[A-Za-z_][\w.]*)\((?P<arguments>.*)\)\s*\]?", re.DOTALL)
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"|\b(?P<key>[A-Za-z_]\w*)(?=\s*=(?!=))"
    r"|\b(?P<literal>true|false|null)\b"
    r"|(?<![\w.])(?P<zeros>0+)(?=[1-9]\d*\b(?!\.))",
    re.DOTALL,
)
"""Text that is not valid Python: line breaks in strings, keywords as keys, and so on."""
_LITERALS = {"true": "True", "false": "False", "null": "None"}
_KEY = "k_"
"""Prefix of each key, because a key may be a keyword of Python."""


def read_pythonic(text: str, tools: ToolSchemas) -> Calls:
    """Read a reply that consists of a list of calls."""
    body = text.strip()
    for mark in _PYTHON_MARKS:
        body = body.replace(mark, "")
    calls = _calls(body, tools) if body.startswith("[") else ()
    return Calls("", calls) if calls else Calls(text)


def read_lfm2(text: str, tools: ToolSchemas) -> Calls:
    """Read the lists of calls between the marks, with any text around them."""
    matches = _BETWEEN.finditer(text)
    return cut_out(text, (Block(*one.span(), _calls(one[1], tools)) for one in matches))


def _calls(text: str, tools: ToolSchemas) -> tuple[CallText, ...]:
    """Return the calls of a list, all or none.

    If arguments are not literals, or are positional, the tool gets their text and refuses it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            parsed = ast.parse(_PIECE.sub(_as_python, text.strip()), mode="eval").body
            entries = parsed.elts if isinstance(parsed, ast.List) else [parsed]
            return tuple(_call(entry, tools) for entry in entries)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        broken = _ONE.fullmatch(text.strip())
        if broken is None or broken["name"] not in functions_of(tools):
            return ()
        return (CallText(broken["name"], broken["arguments"].strip()),)


def _as_python(match: re.Match[str]) -> str:
    if match["text"]:
        return match["text"].replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    if match["key"]:
        return f"{_KEY}{match['key']}"
    return _LITERALS.get(match["literal"], "")


def _call(entry: ast.expr, tools: ToolSchemas) -> CallText:
    """Return one call; raises ValueError or TypeError if it is none."""
    if not isinstance(entry, ast.Call) or entry.args:
        raise ValueError("no call by keywords")
    if not isinstance(entry.func, ast.Name | ast.Attribute):
        raise ValueError("no name")
    name = ast.unparse(entry.func)
    values: dict[str, JsonValue] = {}
    for keyword in entry.keywords:
        if keyword.arg is None:
            raise ValueError("no key")
        is_bare = isinstance(keyword.value, ast.Name)
        value = ast.unparse(keyword.value) if is_bare else ast.literal_eval(keyword.value)
        values[keyword.arg.removeprefix(_KEY)] = load_json(dump_json(value))
    return CallText(name, dump_json(retyped(name, values, tools)))


PYTHONIC = ToolCallParser(name="pythonic", read=read_pythonic, marks=_PYTHON_MARKS)
LFM2 = ToolCallParser(name="lfm2", read=read_lfm2, marks=_LFM2_MARKS)
