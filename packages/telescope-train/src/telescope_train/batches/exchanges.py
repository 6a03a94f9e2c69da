"""Exchange samples between any two bins of a step, until no exchange makes a round cheaper.

The most expensive bin of a round gives a sample to another bin, of any round, or exchanges it for a
cheaper one, as long as no bin becomes more expensive than the most expensive one of its own round.
So no round ever costs more than before. Letters: N samples, R ranks, Q rounds, P places (bins,
round by round), C = N + P candidates in exchange for a sample: any other sample, or nothing from
the bin of that place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.binning import Bin

_MOST_COMPARED = 2**21
"""Most pairs of samples to compare, which bounds the time to about 0.05 s."""

_IDLE_PER_RANK = 4


def exchanged(
    ranks: Sequence[Sequence[Bin]],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    *,
    capacity: int,
    enough: float,
) -> list[list[Bin]]:
    """Return the bins of each rank after exchanges; no bin holds more than `capacity` tokens.

    `enough` is the cost of the step at which it stops: see `waiting_time`.
    """
    plan = _Plan(ranks, lengths_N, costs_N, capacity)
    stuck = np.zeros(plan.num_rounds, np.bool_)
    least, num_idle = plan.time, 0
    # A round may have as many dearest bins as there are ranks. Where exchanges gain nothing for
    # longer, equal samples are moved to and fro.
    while not stuck.all() and num_idle <= _IDLE_PER_RANK * len(ranks):
        if plan.time <= enough or plan.num_compared > _MOST_COMPARED:
            break
        # Where ranks wait most, there is most to gain.
        wasteful = int(np.where(stuck, -np.inf, plan.waits_Q()).argmax())
        if plan.make_cheaper(wasteful):
            stuck[:] = False
        else:
            stuck[wasteful] = True
        num_idle = num_idle + 1 if plan.time >= (1.0 - 1e-9) * least else 0
        least = min(least, plan.time)
    return plan.ranks()


class _Plan:
    """The bins of a step, with their costs."""

    def __init__(
        self,
        ranks: Sequence[Sequence[Bin]],
        lengths_N: NDArray[np.int64],
        costs_N: NDArray[np.float64],
        capacity: int,
    ) -> None:
        self.num_rounds = len(ranks[0])
        self.num_compared = 0
        self._num_ranks, self._capacity = len(ranks), capacity
        self._bins = [members for one in zip(*ranks, strict=True) for members in one]
        nothing = np.zeros(len(self._bins))
        self._costs_C = np.concatenate([costs_N, nothing])
        self._lengths_C = np.concatenate([lengths_N, nothing.astype(np.int64)])
        self._places_C = np.concatenate(
            [np.zeros(len(lengths_N), np.int64), np.arange(nothing.size)]
        )
        for place, members in enumerate(self._bins):
            self._places_C[members] = place
        self._costs_P = np.array([costs_N[members].sum() for members in self._bins])
        self._tokens_P = np.array([lengths_N[members].sum() for members in self._bins])

    @property
    def time(self) -> float:
        """The cost of the step."""
        return float(self._costs_QR().max(axis=1).sum())

    def waits_Q(self) -> NDArray[np.float64]:
        """[Q] total waiting time of all ranks in each round."""
        costs_QR = self._costs_QR()
        return self._num_ranks * costs_QR.max(axis=1) - costs_QR.sum(axis=1)

    def ranks(self) -> list[list[Bin]]:
        """Return the bins of each rank, in the order of the rounds."""
        return [self._bins[rank :: self._num_ranks] for rank in range(self._num_ranks)]

    def make_cheaper(self, number: int) -> bool:
        """Make the most expensive bin of a round cheaper; returns False if no exchange does."""
        row = slice(number * self._num_ranks, (number + 1) * self._num_ranks)
        costs_R = self._costs_P[row]
        dear = row.start + int(costs_R.argmax())
        cost = float(self._costs_P[dear])
        limits_P = np.repeat(self._costs_QR().max(axis=1), self._num_ranks)
        # In its own round, another bin must not become the dearest instead.
        limits_P[row] = cost * (1.0 - 1e-9)
        goes = self._bins[dear]
        moved = self._costs_C[goes][:, None] - self._costs_C
        tokens = self._lengths_C[goes][:, None] - self._lengths_C
        self.num_compared += moved.size
        slack_C = (limits_P - self._costs_P)[self._places_C]
        room_C = (self._capacity - self._tokens_P)[self._places_C]
        room = self._capacity - int(self._tokens_P[dear])
        fits = (moved > 1e-9 * cost) & (moved <= slack_C) & (tokens <= room_C) & (-tokens <= room)
        fits &= self._places_C != dear
        if not fits.any():
            return False
        # Below the mean of its round nothing is gained.
        distance = np.where(fits, np.abs(moved - (cost - float(costs_R.mean()))), np.inf)
        away, back = np.unravel_index(int(distance.argmin()), distance.shape)
        self._exchange(dear, int(goes[away]), int(back))
        return True

    def _exchange(self, dear: int, sample: int, back: int) -> None:
        """Exchange `sample` of bin `dear` for candidate `back`, which comes from another bin."""
        num_samples = len(self._costs_C) - len(self._bins)
        other = int(self._places_C[back])
        self._bins[dear] = self._bins[dear][self._bins[dear] != sample]
        self._bins[other] = np.append(self._bins[other], sample)
        self._places_C[sample] = other
        if back < num_samples:
            self._bins[other] = self._bins[other][self._bins[other] != back]
            self._bins[dear] = np.append(self._bins[dear], back)
            self._places_C[back] = dear
        for place in (dear, other):
            self._costs_P[place] = self._costs_C[self._bins[place]].sum()
            self._tokens_P[place] = self._lengths_C[self._bins[place]].sum()

    def _costs_QR(self) -> NDArray[np.float64]:
        return self._costs_P.reshape(self.num_rounds, self._num_ranks)
