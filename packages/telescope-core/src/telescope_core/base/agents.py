"""Identify the agent behind each model request when a rollout has several: sub-agents or seats."""

import hashlib
from collections.abc import Sequence

from telescope_core.base.types import Message

_DIGITS = 12
"""Hexadecimal digits of a digest that names an agent."""


def agent_of(messages: Sequence[Message]) -> str:
    """Return the name of the agent that sent `messages`, as in `Turn.agent`.

    Agents are distinguished by their system messages, also in programs that do not know Telescope;
    empty = no system message.
    """
    if not messages or messages[0].role != "system":
        return ""
    return hashlib.sha256(messages[0].content.encode()).hexdigest()[:_DIGITS]
