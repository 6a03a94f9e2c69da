"""Shared by the readers of other APIs: chat messages, each with its place in the request."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telescope_core.gateway.refusal import Refusal, unsupported

_ORDER = ("thinking", "text", "call")
"""The parts of one answer, in the order in which a model writes them."""


class Placed(NamedTuple):
    """A message of the chat API, and the name of its place in the request."""

    message: dict[str, Any]
    where: str


def answer_for(placed: list[Placed], kind: str, where: str) -> dict[str, Any]:
    """Return the assistant message that a part of this kind belongs to; adds one if needed.

    It is the last message, if that is the assistant's and the part continues it, else a new one:
    programs send the parts of an answer separately. `kind`: thinking, text or call.
    """
    last = placed[-1].message if placed else {"role": ""}
    if last["role"] == "assistant":
        begun = "text" if last["content"] else "thinking"
        begun = "call" if last["tool_calls"] else begun
        if _ORDER.index(kind) >= _ORDER.index(begun):
            return last
    made: dict[str, Any] = {
        "role": "assistant",
        "content": [],
        "reasoning_content": "",
        "tool_calls": [],
    }
    placed.append(Placed(made, where))
    return made


def chat_messages(placed: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return the messages of a chat request; raises Refusal if they end with an answer."""
    if placed and placed[-1].message["role"] == "assistant":
        raise unsupported(
            placed[-1].where,
            "an answer that goes on from the text of an assistant message is not sampled here; "
            "end with a message of the user",
        )
    return [
        {
            # Endpoints refuse an empty list of calls, and many do not know reasoning_content.
            **{name: value for name, value in one.message.items() if value or name == "content"},
            "content": _content(one.message["content"]),
        }
        for one in placed
    ]


def without_use_of_no_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` of a chat request without what says how to use tools, if it has none.

    The chat API refuses these where no tools are offered, but the other APIs take them.
    """
    is_idle = not fields.get("tools")
    idle: set[str] = {"parallel_tool_calls"} if is_idle else set()
    if is_idle and fields.get("tool_choice") in ("auto", "none"):
        idle.add("tool_choice")
    return {name: value for name, value in fields.items() if name not in idle}


def _content(parts: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts of `parts` joined by newlines, or the parts themselves if one is an image.

    Endpoints that an eval passes requests on to take text everywhere, but lists of parts not.
    """
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def in_words_of(refusal: Refusal, placed: Sequence[Placed], names: Mapping[str, str]) -> Refusal:
    """Return `refusal` of a chat request in terms of the request that it was made from.

    `names`: name of a parameter, or of `tool_call_id`, in the chat API -> its name there.
    """

    def named(found: re.Match[str]) -> str:
        number = int(found[1])
        return placed[number].where if number < len(placed) else found[0]

    def translated(text: str) -> str:
        text = re.sub(r"messages\[(\d{1,6})\]", named, text)
        return text.replace(".tool_call_id", f".{names['tool_call_id']}")

    param = refusal.param or ""
    message = refusal.message
    if message.startswith(param):
        message = names.get(param, param) + message[len(param) :]
    return Refusal(
        translated(message),
        param=translated(names.get(param, param)) or None,
        code=refusal.code,
        status=refusal.status,
    )
