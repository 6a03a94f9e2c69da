"""Rollout rows as Parquet: one schema for every status, zstd compression, atomic writes."""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from telescope_core.errors import ConfigError
from telescope_core.records.folders import whole_file
from telescope_core.records.rows import TOKEN_FIELDS, RolloutRow, row_from_json, row_to_json
from telescope_core.types import RolloutStatus

_JSON_COLUMNS = ("rewards", "metrics", "tags", "golden_answers", "info")


def write_rows(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write `rows` to `path` atomically."""
    arrow, parquet = _pyarrow()
    schema = _schema()
    fields = [_fields(row) for row in rows]
    table = arrow.Table.from_arrays(
        [
            _tokens(rows, name) if name in TOKEN_FIELDS else _column(fields, name, schema)
            for name in schema.names
        ],
        schema=schema,
    )
    with whole_file(path) as temporary:
        # Token ids and log-probs repeat rarely, so dictionaries for them double the time of plain
        # columns and make the file larger.
        parquet.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=[name for name in _leaves(schema) if not name.startswith(TOKEN_FIELDS)],
            use_byte_stream_split=["logprobs.list.element.list.element"],
        )


def read_rows(paths: Iterable[Path]) -> list[RolloutRow]:
    """Return the rows of `paths`, in order; raises ConfigError that names an unreadable file."""
    arrow, parquet = _pyarrow()
    rows: list[RolloutRow] = []
    for path in paths:
        try:
            columns = parquet.read_table(path).to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} is not a readable rollout file: {error}") from None
        rows += [_from_columns(fields) for fields in columns]
    return rows


def count_rows(paths: Iterable[Path]) -> Counter[tuple[str, RolloutStatus]]:
    """Return (environment, status) -> number of rows; reads only those two columns."""
    pairs = _text_pairs(paths, "environment", "status")
    return Counter((environment, RolloutStatus(status)) for environment, status in pairs)


def examples_of_rows(paths: Iterable[Path]) -> set[tuple[str, str]]:
    """Return (environment, example id) of all rows that name one; reads only those two columns."""
    # A rollout that failed before it had its example names none.
    return {pair for pair in _text_pairs(paths, "environment", "example_id") if pair[1]}


def _text_pairs(paths: Iterable[Path], first: str, second: str) -> Iterator[tuple[str, str]]:
    arrow, parquet = _pyarrow()
    for path in paths:
        try:
            table = parquet.read_table(path, columns=[first, second])
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} is not a readable rollout file: {error}") from None
        yield from zip(*(table.column(name).to_pylist() for name in (first, second)), strict=True)


def _fields(row: RolloutRow) -> dict[str, Any]:
    """Return the recorded fields of a row, except its tokens."""
    fields: dict[str, Any] = dict(row_to_json(replace(row, **dict.fromkeys(TOKEN_FIELDS))))
    for name in _JSON_COLUMNS:
        fields[name] = _as_json(fields[name])
    for message in fields["messages"]:
        message["tool_calls"] = _as_json(message.get("tool_calls", []))
    return fields


def _as_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return `value` as JSON; most values are empty, and skipping the encoder saves time."""
    if value:
        return json.dumps(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _column(fields: Sequence[dict[str, Any]], name: str, schema: Any) -> Any:
    arrow, _ = _pyarrow()
    return arrow.array([row[name] for row in fields], type=schema.field(name).type)


def _tokens(rows: Sequence[RolloutRow], name: str) -> Any:
    """Return a token column, nested by row and turn, built from the bytes of the turns' arrays."""
    arrow, _ = _pyarrow()
    code, kind = ("f", arrow.float32()) if name == "logprobs" else ("i", arrow.int32())
    turns_by_row: list[Sequence[Sequence[float]] | None] = [getattr(row, name) for row in rows]
    turns = [_packed(code, turn) for turns in turns_by_row for turn in turns or ()]
    values = arrow.Array.from_buffers(
        kind, sum(map(len, turns)), [None, arrow.py_buffer(b"".join(turns))]
    )
    per_turn = arrow.ListArray.from_arrays(_offsets(map(len, turns)), values)
    return arrow.ListArray.from_arrays(
        _offsets(len(turns or ()) for turns in turns_by_row),
        per_turn,
        mask=arrow.array([turns is None for turns in turns_by_row], arrow.bool_()),
    )


def _packed(code: str, turn: Sequence[float]) -> "array[Any]":
    """Return `turn` as an array of type `code`; an array of that type is not copied."""
    if isinstance(turn, array) and cast("array[Any]", turn).typecode == code:
        return cast("array[Any]", turn)
    return array(code, cast(Any, turn))


def _offsets(sizes: Iterable[int]) -> Any:
    arrow, _ = _pyarrow()
    return arrow.array([0, *accumulate(sizes)], arrow.int32())


def _from_columns(fields: dict[str, Any]) -> RolloutRow:
    for name in _JSON_COLUMNS:
        if name in fields:
            fields[name] = json.loads(fields[name])
    for message in fields["messages"]:
        message["tool_calls"] = json.loads(message["tool_calls"])
    return row_from_json(fields)


def _schema() -> Any:
    arrow, _ = _pyarrow()
    text, number, count = arrow.string(), arrow.float64(), arrow.int32()
    message = arrow.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", text),
            ("tool_call_id", text),
        ]
    )
    return arrow.schema(
        [
            ("step", count),
            ("environment", text),
            ("example_id", text),
            ("group_id", text),
            ("index", count),
            ("status", text),
            ("status_reason", text),
            ("error", text),
            ("stop_reason", text),
            ("reward", number),
            ("advantage", number),
            ("rewards", text),
            ("metrics", text),
            ("tags", text),
            ("golden_answers", text),
            ("info", text),
            ("messages", arrow.list_(message)),
            ("num_turns", count),
            ("num_prompt_tokens", count),
            ("num_completion_tokens", count),
            ("is_truncated", arrow.bool_()),
            ("oldest_version", count),
            ("newest_version", count),
            ("generate_s", number),
            ("score_s", number),
            ("prompt_ids", arrow.list_(arrow.list_(arrow.int32()))),
            ("completion_ids", arrow.list_(arrow.list_(arrow.int32()))),
            ("logprobs", arrow.list_(arrow.list_(arrow.float32()))),
        ]
    )


def _leaves(schema: Any) -> list[str]:
    """Return the names of the Parquet columns, with the fields of messages as separate ones."""
    inside = [
        f"messages.list.element.{field.name}" for field in schema.field("messages").type.value_type
    ]
    return [name for name in schema.names if name != "messages"] + inside


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "rollout files need pyarrow, which is not installed; "
            "run: pip install 'telescope-core[records]'"
        ) from None
    return pyarrow, pyarrow.parquet
