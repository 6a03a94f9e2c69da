"""Parquet files of steps: one for each new step, one for many old ones.

    token_facts/steps-000001-000100.parquet   row groups of these steps, in their order
    token_facts/step-000101.parquet           what one step wrote

Otherwise a run of many steps would leave as many files of a few KiB each. If a step has its own
file, that file counts and not the merged one, so that a kill at any moment loses and doubles
nothing. Only the writer of the folder merges and separates its files.
"""

import json
import logging
import os
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.folders import whole_file

STEPS_PER_FILE = 100
LARGE_BYTES = 4 * 2**20
"""Size in bytes from which on files are not merged: there are few of them for their size."""
_MOST_BLOCKS = 2
"""Blocks that are merged at once; a folder from an earlier version may hold many."""
_NUM_GROUPS = b"telescope.row_groups_of_steps"
_COUNTS = msgspec.json.Decoder(dict[int, Annotated[int, msgspec.Meta(ge=0)]])
_LOGGER = logging.getLogger(__name__)


class StepPart(NamedTuple):
    """Location of the rows of a step."""

    path: Path
    groups: range | None = None
    """Its row groups in a file of many steps; None = the file is its own."""


def step_path(folder: Path, step: int) -> Path:
    """Return the file of one step."""
    return folder / f"step-{step:06d}.parquet"


def merged_path(folder: Path, step: int) -> Path:
    """Return the file of many steps to which `step` belongs."""
    first = step - (step - 1) % STEPS_PER_FILE
    return folder / f"steps-{first:06d}-{first + STEPS_PER_FILE - 1:06d}.parquet"


def parts_in(folder: Path) -> dict[int, StepPart]:
    """Return the location of the rows of each step in `folder`, in the order of the steps.

    Raises ConfigError that names a merged file which cannot be read.
    """
    # In this order: it is merged before the single one is deleted.
    single = {step: StepPart(step_path(folder, step)) for step in _single_steps(folder)}
    merged = {
        step: StepPart(path, groups)
        for path in folder.glob("steps-*.parquet")
        for step, groups in groups_in(path).items()
    }
    return dict(sorted((merged | single).items()))


def part_of(folder: Path, step: int) -> StepPart | None:
    """Return the location of the rows of `step`; None if none were written.

    Raises ConfigError that names a merged file which cannot be read.
    """
    # In this order: it is merged before the single one is deleted.
    path = step_path(folder, step)
    return StepPart(path) if path.is_file() else part_in(merged_path(folder, step), step)


def moved(part: StepPart) -> StepPart | None:
    """Return the new location of the rows of a step whose file was merged; None if it is gone."""
    step = part.path.stem.removeprefix("step-")
    if part.groups is not None or not step.isdecimal():
        return None
    return part_in(merged_path(part.path.parent, int(step)), int(step))


def part_in(merged: Path, step: int) -> StepPart | None:
    """Return the location of the rows of `step` in the merged file; None if they are not there."""
    groups = groups_in(merged).get(step)
    return None if groups is None else StepPart(merged, groups)


def groups_in(path: Path) -> dict[int, range]:
    """Return the row groups of each step in a merged file; none if there is no such file.

    Raises ConfigError that names a file which is not Parquet.
    """
    arrow, parquet = arrow_modules()
    problem = f"{path} is not a readable file of steps; move it away to do without what it holds"
    try:
        metadata: Any = parquet.read_metadata(path)
        keys: Mapping[bytes, bytes] = metadata.metadata or {}
        counts = _COUNTS.decode(keys.get(_NUM_GROUPS, b""))
    except FileNotFoundError:
        return {}
    except (arrow.ArrowException, OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{problem} ({error})") from None
    if sum(counts.values()) != metadata.num_row_groups:
        raise ConfigError(f"{problem} (it lacks row groups)")
    return _in_a_row(counts)


def rows_in(path: Path) -> dict[int, range]:
    """Return the rows of each step in a merged file, 0 first; none if there is no such file.

    Raises ConfigError that names a file which is not Parquet.
    """
    groups = groups_in(path)
    if not groups:
        return {}
    _, parquet = arrow_modules()
    metadata: Any = parquet.read_metadata(path)
    return _in_a_row(
        {
            step: sum(metadata.row_group(one).num_rows for one in some)
            for step, some in groups.items()
        }
    )


def _in_a_row(counts: Mapping[int, int]) -> dict[int, range]:
    """Return the numbers of each step's items if those of all steps are numbered in a row."""
    bounds = pairwise(accumulate(counts.values(), initial=0))
    return {step: range(*ends) for step, ends in zip(counts, bounds, strict=True)}


def merge(folder: Path, *, up_to: int, options: Mapping[str, Any]) -> None:
    """Merge the small files of each complete block, if step `up_to` ends a block.

    `options`: those of `pyarrow.parquet.ParquetWriter`. Files that cannot be merged stay unchanged.
    """
    if up_to % STEPS_PER_FILE:
        return
    arrow, _ = arrow_modules()
    small: dict[Path, list[int]] = {}
    for step in _single_steps(folder):
        if step <= up_to and step_path(folder, step).stat().st_size < LARGE_BYTES:
            small.setdefault(merged_path(folder, step), []).append(step)
    num_merged = 0
    for target, steps in sorted(small.items(), reverse=True):
        if num_merged == _MOST_BLOCKS:
            return
        try:
            parts = {step: StepPart(target, groups) for step, groups in groups_in(target).items()}
            parts |= {step: StepPart(step_path(folder, step)) for step in steps}
            _write(target, parts, options)
        except (arrow.ArrowException, OSError, ConfigError, NoRoomError) as error:
            _LOGGER.warning("files for %s stay apart: %s", target, error)
            continue
        except ValueError:  # Arrow's, which lists the columns of both.
            why = "some of them have the columns of an earlier version; all are read as before"
            _LOGGER.warning("files for %s stay apart: %s", target, why)
            continue
        for step in steps:
            step_path(folder, step).unlink()
        num_merged += 1


def separate(folder: Path, *, after: int, options: Mapping[str, Any]) -> None:
    """Give each step after `after` a file of its own again, if it has none.

    Raises ConfigError that names a file which holds such steps and cannot be read.
    """
    for path in folder.glob("steps-*.parquet"):
        if int(path.stem.rpartition("-")[2]) <= after:
            continue
        parts = {step: StepPart(path, groups) for step, groups in groups_in(path).items()}
        apart = [step for step in parts if step > after]
        for step in apart:
            if not step_path(folder, step).is_file():
                _write(step_path(folder, step), {step: parts[step]}, options)
        if len(apart) == len(parts):
            path.unlink()
        elif apart:
            kept = {step: part for step, part in parts.items() if step <= after}
            _write(path, kept, options)


def _single_steps(folder: Path) -> list[int]:
    stems = (path.stem for path in folder.glob("step-*.parquet"))
    return sorted(int(stem.removeprefix("step-")) for stem in stems)


def _write(path: Path, parts: Mapping[int, StepPart], options: Mapping[str, Any]) -> None:
    """Write the rows of `parts` to `path`, completely even if power is lost meanwhile."""
    _, parquet = arrow_modules()
    steps = sorted(parts)
    counts: dict[int, int] = {}
    for step in steps:
        one, groups = parts[step]
        metadata = parquet.read_metadata(one)
        counts[step] = metadata.num_row_groups if groups is None else len(groups)
    schema = parquet.read_schema(parts[steps[0]].path)
    schema = schema.with_metadata({_NUM_GROUPS: json.dumps(counts)})
    with whole_file(path) as temporary:
        with parquet.ParquetWriter(temporary, schema, **options) as out:
            for step in steps:
                one, groups = parts[step]
                with parquet.ParquetFile(one) as file:
                    for group in range(file.num_row_groups) if groups is None else groups:
                        out.write_table(file.read_row_group(group).cast(schema))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
