"""Rollout rows as Parquet: one schema for every status, zstd, written then renamed."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from telescope_core.errors import ConfigError
from telescope_core.records.rows import RolloutRow, row_from_json, row_to_json
from telescope_core.types import RolloutStatus

_JSON_COLUMNS = ("rewards", "metrics", "tags")


def write_rows(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write `rows` to `path`, whole or not at all."""
    arrow, parquet = _pyarrow()
    table = arrow.Table.from_pylist([_to_columns(row) for row in rows], schema=_schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        parquet.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rows(paths: Iterable[Path]) -> list[RolloutRow]:
    """Return the rows of `paths`, in order; raises ConfigError naming a file that is broken."""
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
    arrow, parquet = _pyarrow()
    counts: Counter[tuple[str, RolloutStatus]] = Counter()
    for path in paths:
        try:
            table = parquet.read_table(path, columns=["environment", "status"])
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} is not a readable rollout file: {error}") from None
        columns = (table.column(name).to_pylist() for name in ("environment", "status"))
        pairs = zip(*columns, strict=True)
        counts.update((environment, RolloutStatus(status)) for environment, status in pairs)
    return counts


def _to_columns(row: RolloutRow) -> dict[str, Any]:
    fields: dict[str, Any] = dict(row_to_json(row))
    for name in _JSON_COLUMNS:
        fields[name] = json.dumps(fields[name])
    for message in fields["messages"]:
        message["tool_calls"] = json.dumps(message.get("tool_calls", []))
    return fields


def _from_columns(fields: dict[str, Any]) -> RolloutRow:
    for name in _JSON_COLUMNS:
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
