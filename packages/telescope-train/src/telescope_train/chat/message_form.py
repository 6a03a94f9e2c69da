"""The form in which a chat template takes messages: field names, text or parts, arguments.

Facts that the text of a template does not show are found by rendering, such as whether it takes a
message's content as a string or as a list of parts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jinja2 import TemplateError

from telescope_core.base.errors import TemplateLossError
from telescope_core.base.types import Message, ToolCall

Render = Callable[[Sequence[dict[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages in the form of a template, with tools; raises one of `REFUSALS`."""
# Templates refuse with `raise_exception`, or fail in Python on messages that they do not expect.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names that templates use for the thinking in messages."""
_WORD = "Quillberg"
_TOOLS = ({"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}},)
_ASKED = Message(role="user", content=_WORD)
_CALLED = Message(
    role="assistant",
    content="",
    tool_calls=(ToolCall(id="PROBE1234", name="lookup", arguments=f'{{"city": "{_WORD}"}}'),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The form in which a template takes messages."""

    reasoning_name: str = _REASONING_NAMES[0]
    """Name under which the template reads the thinking."""
    as_parts: bool = False
    """Whether content is a list of text parts; a string would be rendered as nothing."""
    arguments_as_text: bool = False
    """Whether the arguments of calls are JSON text; most templates take an object."""

    def plain(self, message: Message, *, wrap_broken: bool = False) -> dict[str, Any]:
        """Return `message` in the form that the template takes.

        Arguments that are not a JSON object stay the text that the policy wrote. With
        `wrap_broken` they become an object that holds this text, for templates that iterate over
        the keys. Raises TemplateLossError for a message with pictures.
        """
        if message.images:
            raise TemplateLossError(
                f"a {message.role} message has a picture ({message.images[0].media_type}), and "
                "the model of this run reads text alone; use an environment of text, or evaluate "
                "a model that takes pictures behind --base-url"
            )
        content: Any = message.content
        if self.as_parts:
            content = [{"type": "text", "text": message.content}]
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            plain[self.reasoning_name] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": self._function(call, wrap_broken)}
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        return plain

    def _function(self, call: ToolCall, wrap_broken: bool) -> dict[str, object]:
        arguments = call.arguments if self.arguments_as_text else _arguments(call.arguments)
        if wrap_broken and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        return {"name": call.name, "arguments": arguments}


def message_form(template: str, render: Render) -> MessageForm:
    """Return the form in which `template`, rendered by `render`, shows the whole content."""
    names = [name for name in _REASONING_NAMES if _reads(template, name)]
    form = MessageForm(reasoning_name=names[0] if names else _REASONING_NAMES[0])
    in_parts = replace(form, as_parts=True)
    if not _shows(render, form, [_ASKED]) and _shows(render, in_parts, [_ASKED]):
        form = in_parts
    as_text = replace(form, arguments_as_text=True)
    called = [_ASKED, _CALLED]
    if not _shows(render, form, called) and _shows(render, as_text, called):
        form = as_text
    return form


def _shows(render: Render, form: MessageForm, messages: Sequence[Message]) -> bool:
    """Return whether every one of the words in `messages`, one in each, is rendered."""
    tools = _TOOLS if any(message.tool_calls for message in messages) else ()
    try:
        text = render([form.plain(message) for message in messages], tools)
    except REFUSALS:
        return False
    return text.count(_WORD) >= len(messages)


def _reads(template: str, name: str) -> bool:
    """Return whether the template reads `name` from a message, as an attribute or a key."""
    return re.search(rf"\.{name}\b|['\"]{name}['\"]", template) is not None


def _arguments(text: str) -> object:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # ValueError also if half a surrogate pair is encoded
        return text
    return cast(object, value) if isinstance(value, dict) else text
