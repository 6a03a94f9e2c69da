"""Find samples that begin with the same tokens. Pure; needs numpy only.

Samples are sorted by their token ids, so those with a common beginning are neighbors. One number
for each sample is then enough: how many tokens at its start are the same as in the sample before
it. A row of such samples is a prefix tree, written in depth-first order. Letters: N samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.batch import TrainingSample

MIN_SHARED_TOKENS = 16
"""Least tokens of a branch that is worth its extra part of attention."""
MIN_SAVED_TOKENS = 64
"""Least computed tokens to save, over all samples, for a shorter branch to be worth it."""


class PrefixOrder(NamedTuple):
    """Samples in an order in which those with a common beginning are adjacent."""

    order_N: NDArray[np.int64]
    """[N] indices of the samples."""
    shared_N: NDArray[np.int64]
    """[N] tokens that each sample, in this order, shares with the one before it."""


def prefix_order(
    samples: Sequence[TrainingSample], *, min_tokens: int = MIN_SHARED_TOKENS
) -> PrefixOrder:
    """Sort `samples` by their tokens and find what neighbors share.

    Beginnings that differ in fewer than `min_tokens` tokens from a shorter shared one are cut down
    to it, unless they save `MIN_SAVED_TOKENS`. Time: a sort of byte strings and a comparison for
    each sample.
    """
    # Any order of bytes puts equal beginnings side by side, and bytes are compared by memcmp.
    keys = [np.ascontiguousarray(sample.token_ids, np.int32).tobytes() for sample in samples]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared_N = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        before, present = samples[order[place - 1]].token_ids, samples[order[place]].token_ids
        shared_N[place] = _common_length(before, present)
    return PrefixOrder(np.array(order, np.int64), without_short_branches(shared_N, min_tokens))


def _common_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def without_short_branches(
    shared_N: NDArray[np.int64], min_tokens: int, min_saved: int = MIN_SAVED_TOKENS
) -> NDArray[np.int64]:
    """Return [N] shared tokens, without branches that are too short for their part of attention.

    It has at least `min_tokens` tokens, or saves at least `min_saved`: its length times the samples
    that have it, but for one. A branch begins where a longer or shorter one ends: at the largest
    smaller number around it.
    """
    shared = shared_N.tolist()
    left = _smaller_before(shared)
    right = [len(shared) - 1 - place for place in reversed(_smaller_before(shared[::-1]))]
    kept = [0] * len(shared)
    # Shorter ones first, because a branch begins where its parent was cut to.
    for place in sorted(range(len(shared)), key=shared.__getitem__):
        around = [one for one in (left[place], right[place]) if 0 <= one < len(shared)]
        begin = kept[max(around, key=shared.__getitem__)] if around else 0
        length, num_others = shared[place] - begin, right[place] - left[place] - 1
        is_kept = length >= min_tokens or length * num_others >= min_saved
        kept[place] = shared[place] if is_kept else begin
    return np.array(kept, np.int64)


def _smaller_before(values: Sequence[int]) -> list[int]:
    """Return for each position the nearest earlier one with a smaller value; -1 = there is none."""
    found: list[int] = []
    rising: list[int] = []
    for place, value in enumerate(values):
        while rising and values[rising[-1]] >= value:
            rising.pop()
        found.append(rising[-1] if rising else -1)
        rising.append(place)
    return found


def shared_among(shared_N: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens that each of `places` shares with the one before it, if alone in a row.

    `places` ascend. Two samples share the least that neighbors between them share.
    """
    found = np.zeros(len(places), np.int64)
    if len(places) > 1:
        # reduceat takes the minimum from each index up to the next one, and the last to the end.
        found[1:] = np.minimum.reduceat(shared_N[: places[-1] + 1], places[:-1] + 1)
    return found


def row_costs(
    lengths_N: NDArray[np.int64], shared_N: NDArray[np.int64], hidden_size: int
) -> NDArray[np.float64]:
    """Return [N] the relative FLOPs that each sample adds to its row; see `sample_costs`.

    Its own tokens attend to the shared ones and, causally, to each other.
    """
    own_N = lengths_N - shared_N
    return own_N * (1.0 + (2.0 * shared_N + own_N) / (12.0 * hidden_size))
