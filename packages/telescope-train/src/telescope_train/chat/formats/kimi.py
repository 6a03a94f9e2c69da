"""The replies of Kimi: K2 marks its calls, K3 puts every part into a channel.

In K2, the id of a call holds the name of the tool, and the template shows the id alone.
"""

import re

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import CallText, dump_json
from telescope_train.chat.formats.reply import Block, Calls, ToolCallParser, ToolSchemas, cut_out
from telescope_train.chat.formats.typed import text_or_json

_K2_MARKS = tuple(
    f"<|tool_call{part}|>"
    for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
)
_K2_SECTION = re.compile(
    r"<\|tool_calls_section_begin\|>(.*?)(?:<\|tool_calls_section_end\|>|\Z)", re.DOTALL
)
_K2_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)
K3_MARKS = ("<|open|>", "<|close|>", "<|sep|>")


def _channel(name: str) -> re.Pattern[str]:
    """Return the pattern of one part of K3, with the groups `head` and `body`."""
    opening = rf"<\|open\|>{name}(?P<head>(?: [^<]*)?)<\|sep\|>"
    return re.compile(rf"{opening}(?P<body>.*?)(?:<\|close\|>{name}<\|sep\|>|\Z)", re.DOTALL)


_RESPONSE, _TOOLS, _CALL = _channel("response"), _channel("tools"), _channel("call")
_ARGUMENT, _JSON = _channel("argument"), _channel("json")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_END_OF_MESSAGE = re.compile(r"<\|close\|>(?:message<\|sep\|>|[a-z]*\Z)")
"""The end of a message, after its parts; a reply that was cut may stop within it."""


def read_kimi_k2(text: str, tools: ToolSchemas) -> Calls:
    """Read `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}` in a section."""
    return cut_out(text, map(_k2_block, _K2_SECTION.finditer(text)))


def _k2_block(section: re.Match[str]) -> Block:
    calls = [
        CallText(one["name"], one["arguments"].strip(), one["id"])
        for one in _K2_CALL.finditer(section[1])
    ]
    return Block(*section.span(), () if _K2_CALL.sub("", section[1]).strip() else calls)


def read_kimi_k3(text: str, tools: ToolSchemas) -> Calls:
    """Unwrap the response, and read the calls in the tools channel if tools are offered."""
    calls: list[CallText] = []

    def without_calls(section: re.Match[str]) -> str:
        found = [_k3_call(one, tools) for one in _CALL.finditer(section["body"])]
        if None in found or not found or _CALL.sub("", section["body"]).strip():
            return section[0]
        calls.extend(call for call in found if call is not None)
        return ""

    rest = _TOOLS.sub(without_calls, text) if tools else text
    said = _RESPONSE.sub(lambda response: response["body"], rest)
    content = _END_OF_MESSAGE.sub("", said)
    return Calls(content.strip() if calls else content, tuple(calls))


def _k3_call(match: re.Match[str], tools: ToolSchemas) -> CallText | None:
    name = dict(_ATTRIBUTE.findall(match["head"])).get("tool")
    if not name:
        return None
    whole = _JSON.search(match["body"])
    if whole is not None and not _JSON.sub("", match["body"]).strip():
        return CallText(name, whole["body"].strip())
    if _ARGUMENT.sub("", match["body"]).strip():
        return None
    values: dict[str, JsonValue] = {}
    for argument in _ARGUMENT.finditer(match["body"]):
        about = dict(_ATTRIBUTE.findall(argument["head"]))
        is_text = about.get("type", "string") == "string"
        values[about.get("key", "")] = text_or_json(argument["body"], is_text=is_text)
    return CallText(name, dump_json(values))


KIMI_K2 = ToolCallParser(name="kimi_k2", read=read_kimi_k2, marks=_K2_MARKS)
KIMI_K3 = ToolCallParser(name="kimi_k3", read=read_kimi_k3, marks=K3_MARKS, is_envelope=True)
