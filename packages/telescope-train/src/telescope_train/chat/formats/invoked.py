"""Tool calls as tags with the name in an attribute: MiniMax-M2, DeepSeek-V3.2 and V4, MiniCPM5."""

import re
from functools import partial

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import CallText, dump_json
from telescope_train.chat.formats.reply import Block, Calls, ToolCallParser, ToolSchemas, cut_out
from telescope_train.chat.formats.typed import text_or_json, typed_call, unwrapped

_DSML = "\uff5cDSML\uff5c"
_NAME = re.compile(r'\bname="([^"]*)"')
_IS_STRING = re.compile(r'\bstring="(true|false)"')


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
