"""Evals, of a run or alone: their results, and each rollout's place in `rollouts.jsonl`."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from telescope_core.base.decoders import json_decoder
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.evals.folder import read_result
from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import Estimate
from telescope_core.records.files import lines_left_out
from telescope_core.records.rows import RolloutRow, row_from_json
from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.files.run_files import (
    MAX_JSON_BYTES,
    Stamp,
    folders,
    inside,
    stamp_of,
    too_large,
)

_TAGGED = re.compile(r"(?s)(.+)-(before|after|step-\d{1,9})")
_LAST = 10**9
MAX_ROLLOUT_BYTES = 128 * 2**20
"""Bytes of the longest line of an eval: a rollout with pictures, of which a message has several."""


class EvalKey(NamedTuple):
    """The parts of the name of an eval's folder."""

    name: str
    tag: str

    @property
    def order(self) -> int:
        """Sort key that increases with the weights: `before`, steps, `after`."""
        if self.tag.startswith("step-"):
            return int(self.tag.removeprefix("step-"))
        return {"before": -1, "after": _LAST}.get(self.tag, 0)


class EvalPlace(NamedTuple):
    """Location of the files of an eval."""

    root: Path
    """Resolved folder outside of which no file may be: that of the run, or else of the eval."""
    folder: str = ""
    """Folder among the evals of the run; empty for an eval without one."""

    def file(self, name: str) -> Path | None:
        """Return the path of a file of the eval; None if it is not there."""
        return inside(self.root, *(("evals", self.folder) if self.folder else ()), name)


class EvalRow(msgspec.Struct, frozen=True):
    """The scalars of a rollout of an eval."""

    group_id: str
    index: int
    example_id: str = ""
    environment: str = ""
    status: str = ""
    reward: float | None = None


class _Said(msgspec.Struct):
    content: str = ""
    reasoning_content: str = ""
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Conversation(msgspec.Struct):
    messages: list[_Said] = []


class PlacedRow(NamedTuple):
    """A rollout and the position of its line."""

    row: EvalRow
    offset: int
    length: int


def eval_keys(run: Path) -> dict[str, EvalKey]:
    """Return the evals of a run by their folders, in the order of the weights."""
    found = {path.name: key_of(path.name) for path in folders(run, "evals")}
    return dict(sorted(found.items(), key=lambda item: (item[1].name, item[1].order, item[0])))


def key_of(folder: str) -> EvalKey:
    """Return the parts of the name of a folder, which may not exist."""
    match = _TAGGED.fullmatch(folder)
    return EvalKey(folder, "") if match is None else EvalKey(match[1], match[2])


def eval_key(run: Path, folder: str) -> EvalKey:
    """Return the parts of the name of an eval's folder; raises NotThereError."""
    known = eval_keys(run)
    if folder not in known:
        raise NotThereError(str(unknown_name("eval", folder, list(known))))
    return known[folder]


def result_of(place: EvalPlace) -> EvalResult | None:
    """Return the result of an existing eval; None without one, or if it cannot be read."""
    return _read(place).result


def problem_of(place: EvalPlace) -> str:
    """Return why the result of an eval cannot be read; empty if it can, or if there is none yet."""
    return _read(place).problem.removeprefix(f"{place.root}{os.sep}")


class _Read(NamedTuple):
    result: EvalResult | None
    problem: str = ""


def _read(place: EvalPlace) -> _Read:
    path = place.file("results.json")
    stamp = None if path is None else stamp_of(path)
    if path is None or stamp is None:
        return _Read(None)
    return _result(path, stamp)


@lru_cache(maxsize=256)
def _result(path: Path, stamp: Stamp) -> _Read:
    """Read a result; `stamp` identifies the content in the cache."""
    if stamp.size > MAX_JSON_BYTES:
        return _Read(None, str(too_large(str(path), stamp)))
    try:
        return _Read(read_result(path.parent))
    except ConfigError as error:
        return _Read(None, str(error))


def main_estimate(result: EvalResult) -> JsonObject:
    """Return the main measure of an eval, pass@k with the smallest k, and its interval."""
    k = min(result.pass_at, default=None)
    main = result.reward if k is None else result.pass_at[k]
    name = "reward" if k is None else f"pass@{k}"
    return {"measure": name, **(estimate(main) or {})}


def estimate(value: Estimate | None) -> JsonObject | None:
    """Return an estimate in the form for pages."""
    return None if value is None else asdict(value)


def rows_of(place: EvalPlace) -> tuple[PlacedRow, ...]:
    """Return the rollouts of an eval; a rollout played twice counts as its later record."""
    return _rows_of(place).rows


def problems_of(place: EvalPlace) -> list[str]:
    """Return what of the result and the rollouts of an eval is left out, each as a sentence."""
    return [*filter(None, [problem_of(place)]), *_left_out(place)]


def _left_out(place: EvalPlace) -> list[str]:
    name = f"evals/{place.folder}/rollouts.jsonl" if place.folder else "rollouts.jsonl"
    found = _rows_of(place)
    problems = [lines_left_out(name, found.num_damaged)] if found.num_damaged else []
    if num := found.num_too_long:
        lines, them = ("1 line", "it") if num == 1 else (f"{num:,} lines", "them")
        problems.append(
            f"{name} has {lines} of more than {MAX_ROLLOUT_BYTES // 2**20} MiB, left out here; "
            f"look at {them} with another program"
        )
    return problems


class _Rows(NamedTuple):
    rows: tuple[PlacedRow, ...] = ()
    num_damaged: int = 0
    num_too_long: int = 0


def _rows_of(place: EvalPlace) -> _Rows:
    path = place.file("rollouts.jsonl")
    stamp = None if path is None else stamp_of(path)
    return _Rows() if path is None or stamp is None else _rows(path, stamp)


@lru_cache(maxsize=64)
def _rows(path: Path, stamp: Stamp) -> _Rows:
    decoder = json_decoder(EvalRow)
    found: dict[tuple[str, int], PlacedRow] = {}
    offset = num_damaged = num_too_long = 0
    is_too_long = False
    with path.open("rb", buffering=2**20) as stream:
        # Bounded, so that a file without line ends fills no memory.
        while part := stream.readline(MAX_ROLLOUT_BYTES):
            is_rest = is_too_long
            is_too_long = len(part) == MAX_ROLLOUT_BYTES and not part.endswith(b"\n")
            if is_rest or is_too_long:
                num_too_long += is_too_long and not is_rest
            else:
                try:
                    row = decoder.decode(part)
                except (ValueError, RecursionError):
                    # A last line without its end is being written.
                    num_damaged += part.endswith(b"\n") and not part.isspace()
                else:
                    found[row.group_id, row.index] = PlacedRow(row, offset, len(part))
            offset += len(part)
    return _Rows(tuple(found.values()), num_damaged, num_too_long)


def texts_of(place: EvalPlace, placed: Sequence[PlacedRow]) -> Iterator[list[str]]:
    """Yield the texts of the messages of each rollout, thinking and tool calls (JSON) too."""
    path = place.file("rollouts.jsonl")
    if path is None:
        return
    decoder = json_decoder(_Conversation)
    with path.open("rb") as stream:
        for one in placed:
            stream.seek(one.offset)
            try:
                messages = decoder.decode(stream.read(one.length)).messages
            except (ValueError, RecursionError):
                # Messages of another form; or the file was replaced, and the next answer sees that.
                messages = []
            yield [
                text
                for said in messages
                for text in (said.content, said.reasoning_content, bytes(said.tool_calls).decode())
            ]


def row_in(place: EvalPlace, group_id: str, index: int) -> RolloutRow:
    """Return one rollout of an eval; raises NotThereError."""
    for placed in rows_of(place):
        if (placed.row.group_id, placed.row.index) == (group_id, index):
            path = place.file("rollouts.jsonl")
            if path is not None:
                with path.open("rb") as stream:
                    stream.seek(placed.offset)
                    line = stream.read(placed.length)
                try:
                    return row_from_json(msgspec.json.decode(line))
                except ValueError as error:
                    why = f"this line of {path.name} cannot be shown; the others can"
                    raise ConfigError(f"{why}\n{error}") from None
    name = place.folder or place.root.name
    why = f"the eval {name!r} has no rollout {index} of a group {group_id!r}"
    raise NotThereError("; ".join([why, *_left_out(place)]))
