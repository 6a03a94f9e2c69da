"""The examples for `telescope eval`: a number, all, positions, ids, or a random choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.number_text import counted
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import EnvironmentDescription, Split
from telescope_core.evals import EvalSettings
from telescope_core.evals.settings import check_split

DEFAULT_EXAMPLES = 64
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selection by `--examples`, `--example` and `--shuffle`, before the split is known."""

    number: int | None = None
    """Number of examples; None = 64, or all if there are fewer."""
    is_all: bool = False
    positions: tuple[int, ...] = ()
    """Positions in the split, 0 first; empty = by number."""
    ids: tuple[str, ...] = ()
    """Ids of examples; empty = by number or position."""
    shuffle: int | None = None
    """Seed of a random choice from the whole split; None = from the first example on."""
    or_train: bool = False
    """Whether an environment without the split plays its training split, as evals of a run do."""


def parse_selection(text: str | None, ids: Sequence[str], shuffle: int | None) -> Selection:
    """Read `64`, `all` or positions such as `0-9,20`; raises ConfigError for anything else."""
    if ids:
        if text is not None or shuffle is not None:
            raise ConfigError("--example names the examples; leave out --examples and --shuffle")
        return Selection(ids=tuple(dict.fromkeys(ids)))
    if text is None:
        return Selection(shuffle=shuffle)
    if text.strip().lower() == _ALL:
        return Selection(is_all=True, shuffle=shuffle)
    if is_number(text):
        return Selection(number=_number(text, text), shuffle=shuffle)
    if shuffle is not None:
        raise ConfigError(f"--shuffle needs a number of examples or all, got positions {text!r}")
    return Selection(positions=_positions(text))


def is_number(text: str) -> bool:
    """Return whether text for `--examples` is a number or `all`, and no positions."""
    return "-" not in text.strip() and "," not in text


async def resolve(
    selection: Selection,
    settings: EvalSettings,
    environment: EnvironmentClient,
    description: EnvironmentDescription,
    *,
    tell: Callable[[str], None],
) -> EvalSettings:
    """Return `settings` with the positions of the selected examples in this environment.

    `tell` is told when fewer examples than the default are there.
    """
    if selection.or_train and settings.split not in description.num_examples:
        settings = replace(settings, split=Split.TRAIN)
    check_split(replace(settings, num_examples=1, positions=()), description)
    size = description.num_examples[settings.split]
    positions = selection.positions
    number = len(positions) or _number_of(selection, size, description, settings.split, tell)
    if selection.ids:
        positions = await _find(selection.ids, environment, settings.split, size)
        number = len(positions)
    elif selection.shuffle is not None:
        if size is None:
            raise ConfigError(
                f"{description.name}: the {settings.split} split is endless, so there is no whole "
                "to choose from; leave out --shuffle"
            )
        positions = tuple(Random(selection.shuffle).sample(range(size), min(number, size)))
    resolved = replace(settings, num_examples=number, positions=positions)
    check_split(resolved, description)
    return resolved


def _number_of(
    selection: Selection,
    size: int | None,
    description: EnvironmentDescription,
    split: Split,
    tell: Callable[[str], None],
) -> int:
    if selection.is_all:
        if size is None:
            raise ConfigError(
                f"{description.name}: the {split} split is endless; give a number of examples"
            )
        return size
    if selection.number is not None:
        return selection.number
    if size is not None and size < DEFAULT_EXAMPLES:
        tell(f"{description.name}: its {split} split is played whole: {counted(size, 'example')}")
        return size
    return DEFAULT_EXAMPLES


async def _find(
    ids: tuple[str, ...], environment: EnvironmentClient, split: Split, size: int | None
) -> tuple[int, ...]:
    """Return the positions of examples by id; only a finite split can be searched."""
    if size is None:
        raise ConfigError(
            f"{environment.name}: the {split} split is endless, so ids cannot be looked up; "
            "give positions, such as --examples 0-9"
        )
    found: dict[str, int] = {}
    for position in range(size):
        found.setdefault((await environment.example(split, position)).id, position)
        if all(one in found for one in ids):
            break
    for one in ids:
        if one not in found:
            raise unknown_name("example", one, list(found), f"(in the {split} split)")
    return tuple(found[one] for one in ids)


def _positions(text: str) -> tuple[int, ...]:
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _number(first, text)
        high = _number(last, text) if dash else low
        if high < low:
            raise ConfigError(f"--examples: {part.strip()} runs backwards; write {high}-{low}")
        positions += range(low, high + 1)
    return tuple(dict.fromkeys(positions))


def _number(part: str, text: str) -> int:
    try:
        number = int(part)
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"--examples must be a number such as 64, all, or positions such as 0-9,20, "
            f"got {text!r}"
        )
    return number
