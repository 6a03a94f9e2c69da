"""Conversations of a Hugging Face dataset, a folder or a local file, checked row by row."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.messages import message_from_json
from telescope_core.base.types import Message
from telescope_core.examples.dataset_source import DatasetSpec, Table, load_table
from telescope_train.chat.rendering import Tools
from telescope_train.models.hub import Kind, look_on_hub
from telescope_train.sft.config import SftConfig

_ROLES = ("system", "user", "assistant", "tool")
_TOOLS = "tools"
"""Column with the tools that were offered, by the name that other trainers give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row of the dataset."""

    label: str
    """Name of the row in error messages."""
    messages: tuple[Message, ...]
    tools: Tools
    """The functions that were offered in it, in the form of the chat API."""


def read_conversations(config: SftConfig) -> list[Conversation]:
    """Return all conversations of the dataset; raises ConfigError that names a row without one."""
    assert config.dataset is not None, "settings without a dataset have environments"
    conversations: list[Conversation] = []
    for number, row in enumerate(_load(config)):
        label = f"row {number} of {config.dataset}"
        if config.messages_field not in row:
            raise ConfigError(
                f"{label} has no column {config.messages_field!r}; set messages_field to one of "
                f"{', '.join(sorted(row))}"
            )
        messages = _messages(row[config.messages_field], label)
        tools = _tools(row.get(_TOOLS), label)
        conversations.append(Conversation(label=label, messages=messages, tools=tools))
    return conversations


def _load(config: SftConfig) -> Table:
    assert config.dataset is not None, "settings without a dataset have environments"
    spec = DatasetSpec(
        path=config.dataset,
        revision=config.dataset_revision or "main",
        subset=config.dataset_subset or "",
    )
    if spec.local is None:
        look_on_hub(Kind.DATASET, config.dataset)
    try:
        return load_table(spec, config.dataset_split)
    except EnvironmentLoadError as error:
        raise ConfigError(f"dataset {config.dataset!r} cannot be read: {error}") from error


def _messages(row: Any, label: str) -> tuple[Message, ...]:
    """Return the conversation in `row`, up to the last message of the assistant."""
    if not isinstance(row, Sequence) or isinstance(row, str) or not row:
        raise ConfigError(f"{label}: expected a list of messages, got {_shown(row)}")
    messages = tuple(_message(fields, label) for fields in row)
    ends = [index for index, one in enumerate(messages) if one.role == "assistant"]
    if not ends:
        raise ConfigError(
            f"{label}: has no assistant message, so nothing can be learned from it; remove the row"
        )
    if ends[0] == 0:
        raise ConfigError(
            f"{label}: begins with an assistant message that answers nothing; remove that message, "
            "or put another message before it"
        )
    return messages[: ends[-1] + 1]


def _message(fields: Any, label: str) -> Message:
    if not isinstance(fields, Mapping) or fields.get("role") not in _ROLES:
        raise ConfigError(
            f"{label}: expected messages with a role of {', '.join(_ROLES)} and a content, "
            f"got {_shown(fields)}"
        )
    content = fields.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"{label}: expected text as content, got {_shown(content)}")
    try:
        return message_from_json(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{label}: expected tool calls as in the chat API, with function.name and "
            f"function.arguments, got {_shown(fields.get('tool_calls'))}"
        ) from error


def _tools(given: Any, label: str) -> Tools:
    """Return the tools of a row: a list, or its JSON text, as tables of many shapes have it."""
    with suppress(ValueError, KeyError, TypeError):
        tools = json.loads(given) if isinstance(given, str) and given else given or []
        names = [one["function"]["name"] for one in tools]
        if isinstance(tools, list) and all(isinstance(name, str) for name in names):
            return tools
    raise ConfigError(
        f"{label}: expected in {_TOOLS!r} a list of functions as in the chat API, with "
        f"function.name, got {_shown(given)}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
