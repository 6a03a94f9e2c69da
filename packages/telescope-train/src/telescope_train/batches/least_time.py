"""The cost of a step, and a lower bound on it for any packing of the samples.

Ranks wait for each other in every round, so a round costs what its dearest bin does.
Letters: N samples, R ranks, Q rounds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.binning import Bin


def waiting_time(ranks: Sequence[Sequence[Bin]], costs_N: NDArray[np.float64]) -> float:
    """Return the cost of a step: the sum over rounds of the most expensive bin of each."""
    return sum(
        max(float(costs_N[members].sum()) for members in one) for one in zip(*ranks, strict=True)
    )


def least_time(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], *, seq_len: int, num_ranks: int
) -> float:
    """Return a lower bound on the cost of any plan, with any number of rounds.

    Sort the rounds of any plan by cost, the most expensive first. Round q costs at least as much as
    some sample that does not fit into the q - 1 rounds before it. The bins of the first q rounds
    can hold only so much, and ranks share the rest evenly at best. Each q gives a lower bound; the
    highest is returned.
    """
    by_cost = np.argsort(-costs_N, kind="stable")
    tokens_N = np.cumsum(lengths_N[by_cost])
    total, room = float(costs_N.sum()), seq_len * num_ranks
    most_rounds = -(-int(tokens_N[-1]) // room)
    most_B = _most_held(lengths_N, costs_N, seq_len, most_rounds * num_ranks)
    least, in_front = total / num_ranks, 0.0
    for num_rounds in range(1, most_rounds + 1):
        left_out = int(np.searchsorted(tokens_N, (num_rounds - 1) * room, side="right"))
        in_front += float(costs_N[by_cost[left_out]])
        held = float(most_B[num_rounds * num_ranks - 1])
        least = max(least, in_front + (total - held) / num_ranks)
    return least


def _most_held(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], seq_len: int, num_bins: int
) -> NDArray[np.float64]:
    """Return the most that one bin, two bins and so on can cost together.

    There are two limits. First, n bins hold at most the n * `seq_len` tokens with the highest
    costs. Second, a bin can hold only one sample of more than half its size, and the rest of the
    bin holds no token that costs more than one of the most expensive sample that fits there.
    """
    density_N = costs_N / lengths_N
    order = np.argsort(-density_N, kind="stable")
    known_tokens = np.concatenate([[0], np.cumsum(lengths_N[order])])
    known_costs = np.concatenate([[0.0], np.cumsum(costs_N[order])])
    by_tokens_B = np.interp(np.arange(1, num_bins + 1) * seq_len, known_tokens, known_costs)
    by_length = np.argsort(lengths_N, kind="stable")
    # At index n: what a token costs in the densest of the n shortest samples.
    densest_N = np.concatenate([[0.0], np.maximum.accumulate(density_N[by_length])])
    long = lengths_N > seq_len / 2
    beside = seq_len - lengths_N[long]
    fitting = np.searchsorted(lengths_N[by_length], beside, side="right")
    num_short = int(np.searchsorted(lengths_N[by_length], seq_len / 2, side="right"))
    with_long = costs_N[long] + beside * densest_N[fitting]
    without = np.full(num_bins, seq_len * densest_N[num_short])
    by_sample_B = np.cumsum(np.sort(np.concatenate([with_long, without]))[::-1])[:num_bins]
    return np.minimum(by_tokens_B, by_sample_B)
