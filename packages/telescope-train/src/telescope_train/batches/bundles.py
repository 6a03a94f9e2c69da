"""Plan rows of samples with a common beginning: bind them into bundles, and place these.

A bundle is a run of neighbors in the order of their tokens, and it is planned like one sample.
Large bundles share the most and are hard to spread over ranks, so several sizes are tried and the
plan with the lowest cost wins; samples without bundles are one of the candidates.
Letters: N samples in the order of their tokens, G bundles.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.binning import Bin
from telescope_train.batches.even_costs import draft_by_costs, spread_by_costs
from telescope_train.batches.least_time import waiting_time
from telescope_train.batches.prefixes import (
    PrefixOrder,
    prefix_order,
    row_costs,
    shared_among,
)

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Divisors of `seq_len` for the sizes of bundles to try."""
_HEAD_SHARE = 0.25
"""Memory of a trained token in the output head and the loss, in that of a token in the layers. It
is at most this much: three vectors of the hidden size, where a layer keeps a dozen and more."""
_GOOD_ENOUGH = 1.01
"""Relative waiting time of ranks below which smaller bundles are not tried."""


def spread_bundles(
    samples: Sequence[TrainingSample],
    lengths_N: NDArray[np.int64],
    *,
    seq_len: int,
    num_ranks: int,
    hidden_size: int,
) -> tuple[list[list[Bin]], PrefixOrder]:
    """Return the bins of each rank, in the order of tokens, and that order of the samples.

    A bin holds at most `seq_len` tokens, counting shared ones once, and at most `seq_len` trained
    tokens. No bin needs more memory than the largest bin would without sharing. This limit is
    needed because more completions fit into a bin that shares, and the output head is computed for
    each of their tokens.
    """
    found = prefix_order(samples)
    lengths_N = lengths_N[found.order_N]
    trained_N = np.array([np.count_nonzero(samples[i].mask) for i in found.order_N.tolist()])
    costs_N = row_costs(lengths_N, np.zeros_like(lengths_N), hidden_size)
    best = spread_by_costs(lengths_N, costs_N, seq_len=seq_len, num_ranks=num_ranks)
    best_time = waiting_time(best, costs_N)
    memory_N = lengths_N + _HEAD_SHARE * trained_N
    most_memory = max(memory_N[members].sum() for rank in best for members in rank)
    best = [[np.sort(members) for members in rank] for rank in best]
    sizes_of = _Sizes(lengths_N, trained_N, seq_len, most_memory)
    is_bundled = False
    for firsts_G in _candidates(found.shared_N, sizes_of):
        shared_N = found.shared_N.copy()
        shared_N[firsts_G] = 0
        sizes_G = sizes_of(
            np.add.reduceat(lengths_N - shared_N, firsts_G), np.add.reduceat(trained_N, firsts_G)
        )
        costs_G = np.add.reduceat(row_costs(lengths_N, shared_N, hidden_size), firsts_G)
        limits = {"seq_len": seq_len, "num_ranks": num_ranks}
        time = waiting_time(draft_by_costs(sizes_G, costs_G, **limits), costs_G)
        if time < best_time:
            ranks = spread_by_costs(sizes_G, costs_G, **limits)
            ends_G = np.append(firsts_G[1:], len(lengths_N))
            best = [[_members(b, firsts_G, ends_G) for b in r] for r in ranks]
            best_time = waiting_time(ranks, costs_G)
            is_bundled = True
        elif is_bundled:
            break  # smaller bundles compute more tokens again
        if best_time <= _GOOD_ENOUGH * costs_G.sum() / num_ranks:
            break
    return best, found


def bundle_sizes(
    samples: Sequence[TrainingSample], *, seq_len: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (tokens of a row, indices of its samples) of each bundle of at most `seq_len` tokens.

    No samples, as of groups whose rewards are all equal, give no bundles.
    """
    if not samples:
        return
    found = prefix_order(samples)
    lengths_N = np.array([len(samples[i]) for i in found.order_N.tolist()])
    trained_N = np.array([np.count_nonzero(samples[i].mask) for i in found.order_N.tolist()])
    memory = seq_len * (1.0 + _HEAD_SHARE * float(trained_N.sum() / lengths_N.sum()))
    sizes_of = _Sizes(lengths_N, trained_N, seq_len, memory)
    firsts = _firsts(found.shared_N, sizes_of, seq_len).tolist()
    for first, end in zip(firsts, [*firsts[1:], len(lengths_N)], strict=True):
        shared_N = found.shared_N[first:end].copy()
        shared_N[0] = 0
        num_tokens = (lengths_N[first:end] - shared_N).sum()
        yield (
            int(sizes_of(num_tokens, trained_N[first:end].sum())),
            found.order_N[first:end].tolist(),
        )


def shared_in_rows(rows: Sequence[Bin], shared_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return for each row the number of tokens that each sample shares with the one before it."""
    return [shared_among(shared_N, members) for members in rows]


class _Sizes:
    """Computes the share of a row that samples take, from their tokens and trained tokens."""

    def __init__(
        self,
        lengths_N: NDArray[np.int64],
        trained_N: NDArray[np.int64],
        seq_len: int,
        most_memory: float,
    ) -> None:
        """`most_memory`: that of the largest permitted row, in tokens of the layers."""
        self.lengths_N, self.trained_N, self.seq_len = lengths_N, trained_N, seq_len
        self.memory = most_memory / seq_len

    def __call__(self, tokens: NDArray[np.int64], trained: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the largest of tokens, trained tokens and memory, at most a row."""
        memory = np.ceil((tokens + _HEAD_SHARE * trained) / self.memory).astype(np.int64)
        sizes: NDArray[np.int64] = np.maximum(np.maximum(tokens, trained), memory)
        # A sample that is alone in its row is as it was without sharing.
        return np.minimum(sizes, self.seq_len)


def _candidates(shared_N: NDArray[np.int64], sizes_of: _Sizes) -> Iterator[NDArray[np.int64]]:
    """Yield the first samples of bundles, for ever smaller bundles."""
    if shared_N.any():
        for part in _PARTS:
            yield _firsts(shared_N, sizes_of, sizes_of.seq_len // part)


def _firsts(shared_N: NDArray[np.int64], sizes_of: _Sizes, capacity: int) -> NDArray[np.int64]:
    """Return the first sample of each bundle if all are filled up to `capacity`."""
    firsts: list[int] = []
    num_tokens = num_trained = 0
    columns = (shared_N.tolist(), sizes_of.lengths_N.tolist(), sizes_of.trained_N.tolist())
    for place, (shared, length, trained) in enumerate(zip(*columns, strict=True)):
        num_tokens += length - shared
        num_trained += trained
        memory = (num_tokens + _HEAD_SHARE * num_trained) / sizes_of.memory
        if not place or not shared or max(num_tokens, num_trained, memory) > capacity:
            firsts.append(place)
            num_tokens, num_trained = length, trained
    return np.array(firsts, np.int64)


def _members(bundles: Bin, firsts_G: NDArray[np.int64], ends_G: NDArray[np.int64]) -> Bin:
    """Return the positions of all samples in `bundles`, ascending."""
    ranges = [np.arange(firsts_G[one], ends_G[one]) for one in np.sort(bundles).tolist()]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
