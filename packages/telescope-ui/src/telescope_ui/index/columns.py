"""The columns of the index: scalars of rollouts, and their types."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["number", "text", "truth"]


class Column(NamedTuple):
    """A column by which rollouts can be filtered and sorted."""

    name: str
    kind: Kind
    type: str
    """Type in SQL."""


_NUMBER, _COUNT, _TEXT = "DOUBLE", "INTEGER", "VARCHAR"
PLAIN = (
    Column("step", "number", _COUNT),
    Column("environment", "text", _TEXT),
    Column("example_id", "text", _TEXT),
    Column("group_id", "text", _TEXT),
    Column("index", "number", _COUNT),
    Column("attempt", "number", _COUNT),
    Column("status", "text", _TEXT),
    Column("status_reason", "text", _TEXT),
    Column("stop_reason", "text", _TEXT),
    Column("reward", "number", _NUMBER),
    Column("advantage", "number", _NUMBER),
    Column("num_turns", "number", _COUNT),
    Column("num_prompt_tokens", "number", _COUNT),
    Column("num_completion_tokens", "number", _COUNT),
    Column("num_http_retries", "number", _COUNT),
    Column("is_truncated", "truth", "BOOLEAN"),
    Column("is_refused", "truth", "BOOLEAN"),
    Column("oldest_version", "number", _COUNT),
    Column("newest_version", "number", _COUNT),
    Column("generate_s", "number", "FLOAT"),
    Column("score_s", "number", "FLOAT"),
    Column("error", "text", _TEXT),
)
"""Columns of the rows of a run folder."""
MAX_ERROR_CHARACTERS = 300
NAMED = {"metrics": "DOUBLE", "rewards": "DOUBLE", "tags": "VARCHAR"}
"""JSON objects whose members become columns `metrics/NAME` and so on, and their type."""
MAX_NAMED = 200
"""Most members of each that become columns; further ones are in the rows only."""
PLACE = (Column("is_replaced", "truth", "BOOLEAN"), Column("row", "number", _COUNT))
"""Place of a rollout: in `attempts/` or `rollouts/`, and its row number in the step."""


def named_columns(names: Sequence[str]) -> list[Column]:
    """Return the columns among `names` that are members of JSON objects."""
    return [
        Column(name, "text" if NAMED[kind] == _TEXT else "number", NAMED[kind])
        for name in names
        for kind in [name.partition("/")[0]]
        if "/" in name and kind in NAMED
    ]
