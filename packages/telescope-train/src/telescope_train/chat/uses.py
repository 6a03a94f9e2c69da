"""The uses of a chat template; each is proved, and refused, separately. Pure."""

from collections.abc import Sequence
from enum import StrEnum

from telescope_core.base.types import Message
from telescope_train.chat.rendering import Tools


class Use(StrEnum):
    """A use of a chat template."""

    ANSWERS = "answers"
    """Every run: the prompt contains the user's text, and answers are read as written."""
    SYSTEM = "system messages"
    """A conversation has a system message."""
    SYSTEM_IN_TURNS = "system messages in later turns"
    """A conversation with a system message continues after an answer."""
    SYSTEM_WITH_TOOLS = "system messages with tools"
    """A conversation with a system message has tools, or calls and their results."""
    TURNS = "several turns"
    """A conversation continues after an answer."""
    THINKING = "thinking"
    """The model writes the marks of thinking."""
    TOOLS = "tools"
    """An environment offers tools."""
    CALLS = "calls in history"
    """A conversation holds a call and its result."""
    PARALLEL_CALLS = "several calls in one turn"
    """A turn with two or more calls is part of a conversation."""
    TEXT_WITH_CALLS = "text beside a call"
    """A turn with both text and a call is part of a conversation."""


def uses_of(messages: Sequence[Message], tools: Tools) -> list[Use]:
    """Return the uses that a prompt for `messages` makes of the template."""
    calling = [message for message in messages if message.tool_calls]
    goes_on = any(message.role == "assistant" and not message.tool_calls for message in messages)
    has_system = any(message.role == "system" for message in messages)
    is_used = {
        Use.ANSWERS: True,
        Use.SYSTEM: has_system,
        Use.SYSTEM_IN_TURNS: has_system and goes_on,
        Use.SYSTEM_WITH_TOOLS: has_system and bool(tools or calling),
        Use.TURNS: goes_on,
        Use.TOOLS: bool(tools),
        Use.CALLS: bool(calling),
        Use.PARALLEL_CALLS: any(len(message.tool_calls) > 1 for message in calling),
        Use.TEXT_WITH_CALLS: any(message.content.strip() for message in calling),
    }
    return [use for use in Use if is_used.get(use)]


def uses_declared(
    *, sends_system: bool = False, offers_tools: bool = False, goes_on: bool = False
) -> list[Use]:
    """Return the uses that an environment declares by its properties."""
    is_used = {
        Use.SYSTEM: sends_system,
        Use.SYSTEM_IN_TURNS: sends_system and goes_on,
        Use.SYSTEM_WITH_TOOLS: sends_system and offers_tools,
        Use.TURNS: goes_on,
        Use.TOOLS: offers_tools,
        Use.CALLS: offers_tools,
    }
    return [use for use in Use if is_used.get(use)]
