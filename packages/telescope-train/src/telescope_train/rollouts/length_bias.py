"""Measure how much shorter the trained rollouts are than the drawn ones so far."""

from collections import defaultdict
from collections.abc import Iterable, Set

from telescope_train.rollouts.order import PendingGroup


class LengthBias:
    """Compares trained rollouts with those of complete batches of draws.

    Unfinished rollouts are longer than finished ones, so only complete batches show how long draws
    are.
    """

    def __init__(self) -> None:
        self._open: defaultdict[int, list[int]] = defaultdict(list)
        self._drawn: list[int] = []
        self._trained: list[int] = []

    def note(self, pending_groups: Iterable[PendingGroup], *, complete: Set[int]) -> float | None:
        """Record that `pending_groups` are trained on, and that the batches `complete` have ended.

        Returns the mean tokens of trained rollouts so far, divided by those of drawn ones; None if
        nothing is known yet.
        """
        for pending in pending_groups:
            lengths = [one.num_completion_tokens for one in pending.group.rollouts]
            self._trained = _added(self._trained, lengths)
            self._open[pending.batch] += lengths
        for batch in complete:
            self._drawn = _added(self._drawn, self._open.pop(batch, []))
        if not self._drawn or not self._drawn[0]:
            return None
        return self._trained[0] / self._trained[1] / (self._drawn[0] / self._drawn[1])


def _added(total: list[int], values: list[int]) -> list[int]:
    """Return sum and number of all values so far."""
    before = total or [0, 0]
    return [before[0] + sum(values), before[1] + len(values)]
