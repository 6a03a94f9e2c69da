"""Conversations of a Hugging Face dataset or of a local JSON Lines file, checked row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope_core.chat.messages import message_from_json
from telescope_core.errors import ConfigError
from telescope_core.types import Message
from telescope_train.models.hub import Kind, look_on_hub
from telescope_train.sft.config import SftConfig

_ROLES = ("system", "user", "assistant", "tool")
_FILES = (".json", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row of the dataset."""

    label: str
    """Name of the row in error messages."""
    messages: tuple[Message, ...]


def read_conversations(config: SftConfig) -> list[Conversation]:
    """Return all conversations of the dataset; raises ConfigError naming a row that is not one."""
    assert config.dataset is not None, "settings without a dataset have environments"
    rows = _load(config)
    if config.messages_field not in rows.column_names:
        raise ConfigError(
            f"dataset {config.dataset!r} has no column {config.messages_field!r}; set "
            f"messages_field to one of {', '.join(sorted(rows.column_names))}"
        )
    column = rows[config.messages_field]
    labels = [f"row {number} of {config.dataset}" for number in range(len(column))]
    return [
        Conversation(label=label, messages=_messages(row, label))
        for label, row in zip(labels, column, strict=True)
    ]


def _load(config: SftConfig) -> Any:
    """Return the rows: an object with `column_names` that gives columns by name."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "reading a dataset needs the package datasets, which is not installed; run: "
            "pip install 'telescope-train[datasets]'"
        ) from error
    assert config.dataset is not None, "settings without a dataset have environments"
    path = Path(config.dataset).expanduser()
    try:
        if path.is_file():
            if path.suffix not in _FILES:
                raise ConfigError(
                    f"dataset {config.dataset!r} must end in {' or '.join(_FILES)} to be read "
                    "as JSON Lines; rename the file, or give a folder of parquet files"
                )
            return datasets.load_dataset(
                "json", data_files={config.dataset_split: str(path)}, split=config.dataset_split
            )
        name = str(path) if path.is_dir() else config.dataset
        if not path.is_dir():
            look_on_hub(Kind.DATASET, name)
        return datasets.load_dataset(
            name,
            config.dataset_subset,
            split=config.dataset_split,
            revision=config.dataset_revision,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(f"dataset {config.dataset!r} cannot be read: {reason}") from error


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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
