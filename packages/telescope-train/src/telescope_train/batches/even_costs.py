"""Even out the costs of the batches in a round, because ranks wait for the slowest one.

Equally full bins do not cost the same: attention grows with the square of a sample's length. Of two
plans, one fills bins best, and one gives each sample, dearest first, to the cheapest bin with room.
Samples are then exchanged in both, and the better one is taken. No number of the step changes.
Letters: N samples, R ranks, Q rounds, P places (bins, round by round), C = N + P candidates in
exchange for a sample: any other sample, or nothing from the bin of that place.
"""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.binning import Bin, deal_by_costs, sample_costs, spread_over_ranks
from telescope_train.batches.least_time import least_time, waiting_time

_EVEN_ENOUGH = 0.005
"""Share by which the most expensive bin of a round may exceed the mean of its round."""
_GOOD_ENOUGH = 0.004
"""Share by which a step may exceed its least possible cost before more plans are tried."""
_TRIES = 4
"""Number of bins, cheapest first, that may exchange samples with the most expensive one."""
_EXCHANGES_PER_RANK = 2
_LOOKS_PER_SAMPLE = 8
"""Full bins that are skipped per sample, on average, before a plan is given up."""
_MOST_COMPARED = 2**21
"""Most pairs of samples to compare, which bounds the time to about 0.05 s."""
_IDLE_PER_RANK = 4


def spread_evenly(
    lengths_N: NDArray[np.int64], *, seq_len: int, num_ranks: int, hidden_size: int
) -> list[list[Bin]]:
    """Return `spread_by_costs` for samples without shared tokens."""
    costs_N = sample_costs(lengths_N, hidden_size)
    return spread_by_costs(lengths_N, costs_N, seq_len=seq_len, num_ranks=num_ranks)


def spread_by_costs(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], *, seq_len: int, num_ranks: int
) -> list[list[Bin]]:
    """Return the bins of each rank, the same number for all, in the order in which they run.

    `costs_N` [N] are relative FLOPs. Rounds are as few as `spread_over_ranks` needs. No bin holds
    more than `seq_len` tokens. The order of the samples changes nothing but which of two equal
    ones goes where.
    """
    return _spread(lengths_N, costs_N, seq_len, num_ranks, is_draft=False)


def draft_by_costs(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], *, seq_len: int, num_ranks: int
) -> list[list[Bin]]:
    """Return a plan like `spread_by_costs` in a fraction of the time, with longer waits."""
    return _spread(lengths_N, costs_N, seq_len, num_ranks, is_draft=True)


def _spread(
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    seq_len: int,
    num_ranks: int,
    *,
    is_draft: bool,
) -> list[list[Bin]]:
    order_N = np.lexsort((costs_N, lengths_N))
    lengths_N, costs_N = lengths_N[order_N], costs_N[order_N]
    bins = spread_over_ranks(lengths_N, seq_len=seq_len, num_ranks=num_ranks)
    plans = [deal_by_costs(bins, costs_N, num_ranks=num_ranks)]
    if num_ranks > 1:
        plans = list(_evened_plans(plans[0], lengths_N, costs_N, seq_len, is_draft=is_draft))
    # Exchanges never make a round dearer, so this is never worse than the plan without them.
    best = min(plans, key=lambda plan: waiting_time(plan, costs_N))
    return [[order_N[members] for members in rank] for rank in best]


def _evened_plans(
    first: list[list[Bin]],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    seq_len: int,
    *,
    is_draft: bool,
) -> Iterator[list[list[Bin]]]:
    """Yield plans with exchanges, until one is good enough."""
    least = least_time(lengths_N, costs_N, seq_len=seq_len, num_ranks=len(first))
    enough = (1.0 + _GOOD_ENOUGH) * least
    evened = _evened(first, lengths_N, costs_N, capacity=seq_len)
    yield evened
    if waiting_time(evened, costs_N) <= enough:
        return
    by_cost = _by_cost(lengths_N, costs_N, capacity=seq_len, num_bins=_num_places(first))
    drafts = [evened]
    if by_cost is not None:
        plan = deal_by_costs(by_cost, costs_N, num_ranks=len(first))
        drafts.append(_evened(plan, lengths_N, costs_N, capacity=seq_len))
        yield drafts[-1]
    for draft in () if is_draft else [*drafts, first]:
        plan = exchanged(draft, lengths_N, costs_N, capacity=seq_len, enough=enough)
        yield plan
        if waiting_time(plan, costs_N) <= enough:
            return


def _num_places(ranks: Sequence[Sequence[Bin]]) -> int:
    return sum(len(rank) for rank in ranks)


def _cost(members: Bin, costs_N: NDArray[np.float64]) -> float:
    return float(costs_N[members].sum())


def _by_cost(
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    *,
    capacity: int,
    num_bins: int,
) -> list[Bin] | None:
    """Give each sample to the cheapest bin with room; None if `num_bins` are too few.

    Bins that are nearly full leave no choice, and cost time: then it is None as well.
    """
    cheapest = [(0.0, number) for number in range(num_bins)]
    rooms = [capacity] * num_bins
    members: list[list[int]] = [[] for _ in range(num_bins)]
    lengths, costs = lengths_N.tolist(), costs_N.tolist()
    num_looks = _LOOKS_PER_SAMPLE * len(lengths)
    for sample in np.argsort(-lengths_N, kind="stable").tolist():
        full: list[tuple[float, int]] = []
        while cheapest and rooms[cheapest[0][1]] < lengths[sample]:
            full.append(heapq.heappop(cheapest))
        num_looks -= len(full)
        if not cheapest or num_looks < 0:
            return None
        cost, number = cheapest[0]
        heapq.heapreplace(cheapest, (cost + costs[sample], number))
        rooms[number] -= lengths[sample]
        members[number].append(sample)
        for one in full:
            heapq.heappush(cheapest, one)
    return [np.array(one, np.int64) for one in members if one]


def _evened(
    ranks: Sequence[Sequence[Bin]],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    *,
    capacity: int,
) -> list[list[Bin]]:
    """Exchange samples within each round."""
    rounds = [
        _even_round(list(one), lengths_N, costs_N, capacity) for one in zip(*ranks, strict=True)
    ]
    return [list(rank) for rank in zip(*rounds, strict=True)]


def _even_round(
    bins: list[Bin], lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], capacity: int
) -> list[Bin]:
    costs_R = np.array([_cost(members, costs_N) for members in bins])
    tokens_R = np.array([lengths_N[members].sum() for members in bins])
    for _ in range(_EXCHANGES_PER_RANK * len(bins)):
        if costs_R.max() <= (1.0 + _EVEN_ENOUGH) * costs_R.mean():
            break
        order = np.argsort(costs_R, kind="stable").tolist()
        dearest = order[-1]
        for cheaper in order[: min(_TRIES, len(bins) - 1)]:
            room = capacity - int(tokens_R[cheaper]), capacity - int(tokens_R[dearest])
            gap = float(costs_R[dearest] - costs_R[cheaper])
            pair = _best_pair(bins[dearest], bins[cheaper], lengths_N, costs_N, room, gap)
            if pair is not None:
                bins[dearest], bins[cheaper] = pair
                for rank in (dearest, cheaper):
                    costs_R[rank] = _cost(bins[rank], costs_N)
                    tokens_R[rank] = lengths_N[bins[rank]].sum()
                break
        else:
            break
    return bins


def _best_pair(
    dear: Bin,
    cheap: Bin,
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    room: tuple[int, int],
    gap: float,
) -> tuple[Bin, Bin] | None:
    """Return both bins after the exchange that evens them most; None if none helps.

    A sample of `dear` goes to `cheap`, for one of its samples or for nothing. `room`: tokens that
    still fit into `cheap` and into `dear`. `gap`: what `dear` costs more than `cheap`.
    """
    if not dear.size:
        return None
    # The last column stands for nothing.
    back_costs = np.append(costs_N[cheap], 0.0)
    back_lengths = np.append(lengths_N[cheap], 0)
    moved = costs_N[dear][:, None] - back_costs
    tokens = lengths_N[dear][:, None] - back_lengths
    fits = (tokens <= room[0]) & (-tokens <= room[1]) & (moved > 0.0) & (moved < gap)
    if not fits.any():
        return None
    distance = np.where(fits, np.abs(moved - gap / 2.0), np.inf)
    away, back = np.unravel_index(int(distance.argmin()), distance.shape)
    goes = dear[away : away + 1]
    comes = cheap[back : back + 1]
    new_dear = np.concatenate([np.delete(dear, away), comes])
    kept = np.delete(cheap, back) if comes.size else cheap
    return new_dear, np.concatenate([kept, goes])


def exchanged(
    ranks: Sequence[Sequence[Bin]],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    *,
    capacity: int,
    enough: float,
) -> list[list[Bin]]:
    """Exchange samples between any two bins of a step, until no exchange makes a round cheaper.

    The most expensive bin of a round gives a sample to another bin, of any round, or exchanges it
    for a cheaper one, as long as no bin becomes more expensive than the most expensive one of its
    own round. So no round ever costs more than before. No bin holds more than `capacity` tokens.

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
