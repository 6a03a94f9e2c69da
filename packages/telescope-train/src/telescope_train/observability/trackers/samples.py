"""Choose the rollouts of a step for trackers: some of each environment, from different groups."""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

from telescope_core.records.rows import RolloutRow

One = TypeVar("One")


def spread(rows: Sequence[RolloutRow], num_rows: int) -> list[RolloutRow]:
    """Return up to `num_rows` rows.

    Environments take turns; within one, no group has its second rollout before all have their
    first.
    """
    environments: dict[str, dict[str, list[RolloutRow]]] = {}
    for row in rows:
        environments.setdefault(row.environment, {}).setdefault(row.group_id, []).append(row)
    return _in_turns(_in_turns(groups.values()) for groups in environments.values())[:num_rows]


def _in_turns(lists: Iterable[Sequence[One]]) -> list[One]:
    """Return the first of each, then the second of each, and so on."""
    left_over = object()
    rounds = zip_longest(*lists, fillvalue=left_over)
    return [one for one in chain.from_iterable(rounds) if one is not left_over]
