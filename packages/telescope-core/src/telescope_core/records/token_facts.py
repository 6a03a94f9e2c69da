"""`TurnFacts`: the trainer's measurements of a turn's tokens, beside the rollouts of a step.

A step has a row for each turn that was trained on, in the file that `step_files` finds. So a turn
without a row was not trained on, if anything was written for its step.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope_core.records.arrow import arrow_modules, in_chunks, reading
from telescope_core.records.folders import whole_file
from telescope_core.records.step_files import StepPart
from telescope_core.records.tokens import arrays_in, list_array

TOKEN_FACTS_FOLDER = "token_facts"
CHUNK_TOKENS = 2**18
"""Approximate tokens in a row group; a rollout is read from few of them."""
_KEY = ("group_id", "index", "attempt")
_VALUES = ("logprobs", "entropy", "effective_advantages")
_LEAVES = [f"{name}.list.element" for name in _VALUES]
WRITER_OPTIONS: Mapping[str, Any] = {
    "compression": dict.fromkeys(("group_id", *_LEAVES), "zstd"),
    "use_dictionary": [*_KEY, "turn", "weight"],
    # Bytes of one kind beside each other: those that the rounding left 0 take no room.
    "use_byte_stream_split": _LEAVES,
}
"""Encoding options of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """One row of `token_facts/`. C = tokens that the policy wrote in the turn.

    Everything is from the first time that the step went over the tokens, so it is under the weights
    that they were first trained from. `effective_advantages` and `entropy` are rounded to float16,
    which holds three digits and takes half of the room.
    """

    group_id: str
    index: int
    attempt: int
    turn: int
    """Number of the turn in its rollout, 0 first."""
    weight: float
    """Share of each token in the loss of its optimizer step."""
    logprobs: "array[float]"
    """[C] the trainer's log-prob of each token, nats, at the temperature of the turn."""
    entropy: "array[float]"
    """[C] entropy of the trainer's distribution at each token, nats."""
    effective_advantages: "array[float]"
    """[C] how hard the loss pushed the log-prob of each token up: minus its derivative by it,
    without the weight. For a plain policy gradient it is the advantage. Ratios and corrections
    scale it, and it is 0 where a clip or a mask took the token out of the gradient."""


def write_facts(path: Path, rows: Iterable[TurnFacts], *, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Write `rows` to `path` atomically; they are taken one by one."""
    arrow, parquet = arrow_modules()
    schema = _schema()
    with (
        whole_file(path) as temporary,
        parquet.ParquetWriter(temporary, schema, **WRITER_OPTIONS) as out,
    ):
        for chunk in in_chunks(rows, lambda row: len(row.logprobs), chunk_tokens):
            out.write_table(arrow.Table.from_arrays(_columns(chunk, schema), schema=schema))


def read_facts(part: StepPart) -> Iterator[TurnFacts]:
    """Yield the rows of a step; raises ConfigError that names an unreadable file."""
    for table in _tables(part, None):
        yield from _rows(table)


def facts_of_rollout(part: StepPart, key: tuple[str, int, int]) -> list[TurnFacts]:
    """Return the rows of one rollout: group, index, attempt; reads little else.

    Raises ConfigError that names an unreadable file.
    """
    return [row for table in _tables(part, key) for row in _rows(table)]


def _tables(part: StepPart, key: tuple[str, int, int] | None) -> Iterator[Any]:
    """Yield the row groups of a step, or those with rows of one rollout."""
    _, parquet = arrow_modules()
    with reading(part.path, "file of token facts"), parquet.ParquetFile(part.path) as file:
        for group in range(file.num_row_groups) if part.groups is None else part.groups:
            if key is None:
                yield file.read_row_group(group)
                continue
            keys = file.read_row_group(group, columns=list(_KEY)).to_pydict()
            every = zip(*(keys[name] for name in _KEY), strict=True)
            chosen = [number for number, one in enumerate(every) if one == key]
            if chosen:
                yield file.read_row_group(group).take(chosen)


def _columns(chunk: Sequence[TurnFacts], schema: Any) -> list[Any]:
    arrow, _ = arrow_modules()
    return [
        list_array([getattr(row, name) for row in chunk], arrow.float32())
        if name in _VALUES
        else arrow.array([getattr(row, name) for row in chunk], schema.field(name).type)
        for name in schema.names
    ]


def _rows(table: Any) -> list[TurnFacts]:
    rows: list[dict[str, Any]] = table.drop_columns(list(_VALUES)).to_pylist()
    for name in _VALUES:
        values = arrays_in("f", table.column(name).combine_chunks())
        for row, one in zip(rows, values, strict=True):
            row[name] = one
    return [TurnFacts(**row) for row in rows]


def _schema() -> Any:
    arrow, _ = arrow_modules()
    count, values = arrow.int32(), arrow.large_list(arrow.float32())
    return arrow.schema(
        [
            ("group_id", arrow.string()),
            ("index", count),
            ("attempt", count),
            ("turn", count),
            ("weight", arrow.float32()),
            *((name, values) for name in _VALUES),
        ]
    )
