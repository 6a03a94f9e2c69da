"""Rollout rows as Parquet: one schema for every status, zstd compression, atomic writes.

Rows are written and read in chunks of bounded size, each a row group of the file.
"""

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from telescope_core.base.chains import chains_of
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import RolloutStatus
from telescope_core.records.arrow import arrow_modules, in_chunks, reading
from telescope_core.records.folders import whole_file
from telescope_core.records.rows import RolloutRow, row_from_json, row_without_tokens
from telescope_core.records.step_files import StepPart, moved
from telescope_core.records.tokens import (
    COLUMNS,
    PER_TURN,
    PLACE_FIELDS,
    Tokens,
    read_tokens,
    token_columns,
    token_fields,
)

CHUNK_BYTES = 64 * 2**20
"""Approximate bytes of tokens, texts and numbers that are copied at a time and form a row group."""
_FILE = "rollout file"
_BATCH_ROWS = 64
"""Number of rows that are decoded at a time to read some of them."""
_JSON_COLUMNS = (
    *("rewards", "metrics", "tags", "golden_answers"),
    *("info", "conversations", "tools"),
)
_COMPRESSED = (
    *("example_id", "group_id", "error", *_JSON_COLUMNS),
    *(f"messages.list.element.{name}" for name in ("content", "reasoning_content", "tool_calls")),
    *(f"messages.list.element.{name}" for name in ("refusal", "images")),
    *(f"chains.list.element.{name}.list.element" for name in ("token_ids", "logprobs")),
    *(f"turns.list.element.{name}" for name in PLACE_FIELDS),
)
"""Texts and tokens. In the other columns dictionaries leave a few bits per row, and a compressor
for each column would cost a step more time than it saves."""


def write_rows(path: Path, rows: Iterable[RolloutRow], *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write `rows` to `path` atomically; they are taken one by one."""
    arrow, parquet = arrow_modules()
    schema = _schema()
    with (
        whole_file(path) as temporary,
        parquet.ParquetWriter(temporary, schema, **writer_options()) as out,
    ):
        every = (_Parts(_fields(row), row.tokens) for row in rows)
        for chunk in in_chunks(every, _size, chunk_bytes):
            fields = [one.fields for one in chunk]
            columns = token_columns([one.tokens for one in chunk])
            arrays = [
                columns[name]
                if name in columns
                else arrow.array([row[name] for row in fields], type=schema.field(name).type)
                for name in schema.names
            ]
            out.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def writer_options() -> dict[str, Any]:
    """Return the encoding options for files of rollouts."""
    # Token ids and log-probs repeat rarely, so dictionaries for them double the time of plain
    # columns and make the file larger.
    return {
        "compression": dict.fromkeys(_COMPRESSED, "zstd"),
        "use_dictionary": [one for one in _leaves(_schema()) if not one.startswith("chains.")],
        "use_byte_stream_split": ["chains.list.element.logprobs.list.element"],
    }


def read_rows(
    parts: Iterable[Path | StepPart], *, with_tokens: bool = True
) -> Iterator[RolloutRow]:
    """Yield the rows of files, or of steps in files of many, in order.

    Raises ConfigError that names an unreadable file.
    """
    for path, file, groups in _opened(parts):
        with reading(path, _FILE):
            for group in groups:
                yield from _rows_of(file, group, with_tokens=with_tokens)


def read_row(part: Path | StepPart, number: int, *, with_tokens: bool = True) -> RolloutRow:
    """Return one row of a file or of a step, 0 first; reads little else.

    Raises ConfigError that names the file if it cannot be read, or has fewer rows.
    """
    (row,) = read_chosen(part, [number], with_tokens=with_tokens)
    return row


def read_chosen(
    part: Path | StepPart, numbers: Sequence[int], *, with_tokens: bool = True
) -> list[RolloutRow]:
    """Return the rows `numbers` of a file or of a step, 0 first, in one pass; reads little else.

    Raises ConfigError that names the file if it cannot be read, or has fewer rows.
    """
    found: dict[int, RolloutRow] = {}
    first = 0
    with closing(_opened([part])) as opened:
        path, file, groups = next(opened)
        with reading(path, _FILE):
            for group in groups:
                size = file.metadata.row_group(group).num_rows
                own = [number - first for number in numbers if first <= number < first + size]
                if own:
                    rows = _rows_in(file, group, own, with_tokens=with_tokens)
                    found |= {first + number: row for number, row in rows}
                first += size
    for number in numbers:
        if number not in found:
            raise ConfigError(
                f"{path} has {first} rows, and row {number} was asked for; it was rewritten"
            )
    return [found[number] for number in numbers]


def _opened(parts: Iterable[Path | StepPart]) -> Generator[tuple[Path, Any, Sequence[int]]]:
    """Yield the path, the Parquet file and the row groups to read of it, for each of `parts`."""
    _, parquet = arrow_modules()
    every = (StepPart(part) if isinstance(part, Path) else part for part in parts)
    # The end of a file of many steps is read once, and not for each of its steps.
    for path, some in groupby(every, key=lambda one: one.path):
        first = next(some)
        if not path.is_file():
            first = moved(first) or first
        with reading(path, _FILE):
            file = parquet.ParquetFile(first.path)
        with file:
            for part in (first, *some):
                groups = range(file.num_row_groups) if part.groups is None else part.groups
                yield part.path, file, groups


def _rows_in(
    file: Any, group: int, numbers: Sequence[int], *, with_tokens: bool
) -> Iterator[tuple[int, RolloutRow]]:
    """Yield the number and the row of some rows of a row group; holds at most one batch.

    A row group is decoded from its beginning, so the last of `numbers` is what it costs.
    """
    left_out = () if with_tokens else (*PER_TURN, *COLUMNS)
    names = [name for name in file.schema_arrow.names if name not in left_out]
    first = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=names):
        own = [number for number in numbers if first <= number < first + batch.num_rows]
        if own:
            # Taken and not sliced, so that offsets of lists begin at 0.
            some = batch.take([number - first for number in own])
            plain = some.select([name for name in names if name not in COLUMNS])
            rows = [_from_columns(fields) for fields in plain.to_pylist()]
            if "chains" in names:
                tokens = read_tokens(*(some.column(name) for name in COLUMNS))
                rows = [replace(row, tokens=one) for row, one in zip(rows, tokens, strict=True)]
            yield from zip(own, rows, strict=True)
        first += batch.num_rows
        if first > max(numbers):
            return


def _rows_of(file: Any, group: int, *, with_tokens: bool) -> Iterator[RolloutRow]:
    names = [name for name in file.schema_arrow.names if name not in COLUMNS]
    if not with_tokens:
        names = [name for name in names if name not in PER_TURN]
    rows = (
        _from_columns(fields) for fields in file.read_row_group(group, columns=names).to_pylist()
    )
    if not with_tokens or "chains" not in file.schema_arrow.names:
        yield from rows
        return
    table = file.read_row_group(group, columns=list(COLUMNS))
    chains, turns = (table.column(name).combine_chunks() for name in COLUMNS)
    for row, tokens in zip(rows, read_tokens(chains, turns), strict=True):
        yield replace(row, tokens=tokens)


class _Parts(NamedTuple):
    """A row in the form in which it is written."""

    fields: dict[str, Any]
    """All fields except the tokens."""
    tokens: Tokens | None


def _size(parts: _Parts) -> int:
    """Return the approximate size of a row, in bytes."""
    fields = parts.fields
    turns: list[list[Any]] = fields["version_spans"]
    chains = chains_of(parts.tokens or ())
    return (
        1000
        + _length(fields)
        + sum(100 + _length(message) for message in fields["messages"])
        + 8 * sum(map(len, turns))
        + 4 * sum(len(one.own_ids) + len(one.logprobs) for one in chains)
    )


def _length(fields: Mapping[str, object]) -> int:
    return sum(len(value) for value in fields.values() if isinstance(value, str))


def count_rows(parts: Iterable[StepPart]) -> Counter[tuple[str, RolloutStatus]]:
    """Return (environment, status) -> number of rows; reads only those two columns."""
    counts = Counter(_columns(parts, "environment", "status"))
    unknown = {status for _, status in counts}.difference(RolloutStatus)
    if unknown:
        raise ConfigError(
            f"expected rollouts with the status {', '.join(RolloutStatus)}, got "
            f"{sorted(map(repr, unknown))[0]}; read the run with the version that wrote it"
        )
    return Counter({(name, RolloutStatus(status)): num for (name, status), num in counts.items()})


def examples_of_rows(parts: Iterable[StepPart]) -> set[tuple[str, str]]:
    """Return (environment, example id) of all rows that name one; reads only those two columns."""
    # A rollout that failed before it had its example names none.
    return {pair for pair in _columns(parts, "environment", "example_id") if pair[1]}


def rewards_of_rows(parts: Iterable[StepPart]) -> Iterator[tuple[str, str, float]]:
    """Yield (environment, example id, reward) of all rows that have them; reads no other column."""
    for environment, example_id, reward in _columns(parts, "environment", "example_id", "reward"):
        if example_id and reward is not None:
            yield environment, example_id, reward


def _columns(parts: Iterable[StepPart], *names: str) -> Iterator[tuple[Any, ...]]:
    for path, file, groups in _opened(parts):
        with reading(path, _FILE):
            table = file.read_row_groups(list(groups), columns=list(names))
        yield from zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _fields(row: RolloutRow) -> dict[str, Any]:
    """Return the recorded fields of a row, except its tokens."""
    fields = row_without_tokens(row)
    for name in _JSON_COLUMNS:
        fields[name] = _as_json(fields[name])
    for message in fields["messages"]:
        message["tool_calls"] = _as_json(message.get("tool_calls", []))
        if "images" in message:
            message["images"] = json.dumps(message["images"])
    fields["version_spans"] = [
        [{"version": version, "num_tokens": num_tokens} for version, num_tokens in turn]
        for turn in row.version_spans
    ]
    return fields


def _as_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return `value` as JSON; empty values, which are the most, skip the encoder."""
    if value:
        return json.dumps(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _from_columns(fields: dict[str, Any]) -> RolloutRow:
    for name in _JSON_COLUMNS:
        if name in fields:
            fields[name] = json.loads(fields[name])
    for message in fields["messages"]:
        message["tool_calls"] = json.loads(message["tool_calls"])
        if message.get("images"):  # files of earlier versions have no such field
            message["images"] = json.loads(message["images"])
    # Files of earlier versions have no such column.
    fields["version_spans"] = [
        [(one["version"], one["num_tokens"]) for one in turn]
        for turn in fields.get("version_spans") or ()
    ]
    return row_from_json(fields)


def _schema() -> Any:
    arrow, _ = arrow_modules()
    text, number, count = arrow.string(), arrow.float64(), arrow.int32()
    span = arrow.struct([("version", count), ("num_tokens", count)])
    texts = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    message = arrow.struct([(name, text) for name in (*texts, "refusal", "images")])
    return arrow.schema(
        [
            ("step", count),
            ("environment", text),
            ("example_id", text),
            ("group_id", text),
            ("index", count),
            ("attempt", count),
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
            ("conversations", text),
            ("tools", text),
            ("num_turns", count),
            ("num_prompt_tokens", count),
            ("num_completion_tokens", count),
            ("is_truncated", arrow.bool_()),
            ("is_refused", arrow.bool_()),
            ("finish_reasons", arrow.list_(text)),
            ("num_http_retries", count),
            ("oldest_version", count),
            ("newest_version", count),
            ("version_spans", arrow.list_(arrow.list_(span))),
            ("generate_s", number),
            ("score_s", number),
            *token_fields(),
        ]
    )


def _leaves(schema: Any) -> list[str]:
    """Return the names of the Parquet columns; fields of structures in lists are columns too."""
    nested = ("messages", "chains", "turns")
    inside = [
        f"{name}.list.element.{field.name}"
        for name in nested
        for field in schema.field(name).type.value_type
    ]
    spans = [
        f"version_spans.list.element.list.element.{name}" for name in ("version", "num_tokens")
    ]
    return (
        [name for name in schema.names if name not in (*nested, "version_spans")] + inside + spans
    )
