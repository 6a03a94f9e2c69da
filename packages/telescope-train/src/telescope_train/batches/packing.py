"""Lay samples end to end in batches of at most `seq_len` tokens, the same number on every rank.

The plan needs only lengths. Every array is then built by one concatenation over the whole step and
cut into views, so no Python runs per token. Attention and positions restart at each sample, so the
packing changes time and memory but never the numbers. Letters: T tokens, N samples, B batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.binning import Bin
from telescope_train.batches.bundles import shared_in_rows, spread_bundles
from telescope_train.batches.even_costs import spread_evenly

Scalar = TypeVar("Scalar", bound=np.generic)

PADDING_TOKENS = 8
"""Length of a batch without samples; ranks must all run the same number of batches."""


def pack(
    samples: Sequence[TrainingSample],
    weights_N: NDArray[np.float64],
    *,
    seq_len: int,
    num_ranks: int,
    hidden_size: int = 1024,
    share_prefixes: bool = False,
) -> list[list[PackedBatch]]:
    """Return the batches of each rank, the same number for all, in the order in which they run.

    `weights_N` [N] is the weight of each trained token of sample n (`weighting.token_weights`).
    The k-th batches of all ranks cost about the same, because ranks wait for each other in every
    batch. `seq_len` is in tokens. `hidden_size` sets how much attention costs relative to the rest.
    With `share_prefixes`, samples that begin alike are packed together, and tokens that a sample
    has in common with the one before it count once. No samples give no batches. Raises ConfigError
    for a sample longer than `seq_len`.
    """
    if not samples:
        return [[] for _ in range(num_ranks)]
    lengths_N = np.array([len(sample.token_ids) for sample in samples])
    longest = int(lengths_N.argmax())
    if lengths_N[longest] > seq_len:
        raise ConfigError(
            f"{samples[longest].label} has {lengths_N[longest]} tokens, but seq_len is {seq_len}; "
            "raise seq_len, or lower max_tokens"
        )
    limits = {"seq_len": seq_len, "num_ranks": num_ranks}
    order_N, shared_N = np.arange(len(samples)), np.zeros(len(samples), np.int64)
    if share_prefixes:
        ranks, found = spread_bundles(samples, lengths_N, **limits, hidden_size=hidden_size)
        order_N, shared_N = found
    else:
        ranks = spread_evenly(lengths_N, **limits, hidden_size=hidden_size)
    rows = [one for rank in ranks for one in rank if one.size]
    batches = _batches(samples, weights_N, lengths_N, [order_N[members] for members in rows])
    if shared_N.any():
        both = zip(batches, shared_in_rows(rows, shared_N), strict=True)
        batches = [_with_shared(batch, shared_S) for batch, shared_S in both]
    # Consumed in the order in which they were built. All ranks must run the same number of
    # collectives, so a rank without samples for a round gets padding instead of nothing.
    filled = iter(batches)
    return [[next(filled) if b.size else padding_batch() for b in rank] for rank in ranks]


def end_to_end(samples: Sequence[TrainingSample], weights_N: NDArray[np.float64]) -> PackedBatch:
    """Return one batch of all `samples` in their order, without a plan."""
    lengths_N = np.array([len(sample) for sample in samples])
    return _batches(samples, weights_N, lengths_N, [np.arange(len(samples))])[0]


def _with_shared(batch: PackedBatch, shared_S: NDArray[np.int64]) -> PackedBatch:
    return replace(batch, shared_S=shared_S) if shared_S.any() else batch


def packing_fill(batches: Sequence[PackedBatch], seq_len: int) -> float:
    """Return the used share of `seq_len`, from 0 to 1, over all batches with samples."""
    num_tokens = [batch.num_computed_tokens for batch in batches if batch.num_tokens]
    return sum(num_tokens) / (len(num_tokens) * seq_len) if num_tokens else 0.0


def padding_batch() -> PackedBatch:
    """Return a batch without samples: all of it padding, all weights 0."""
    size = PADDING_TOKENS
    return PackedBatch(
        token_ids_T=np.zeros(size, np.int32),
        positions_T=np.arange(size, dtype=np.int32),
        sequence_ids_T=np.full(size, -1, np.int32),
        mask_T=np.zeros(size, np.bool_),
        behavior_logprobs_T=np.zeros(size, np.float32),
        advantages_T=np.zeros(size, np.float32),
        weights_T=np.zeros(size, np.float64),
        temperatures_T=np.ones(size, np.float32),
        versions_T=np.full(size, -1, np.int32),
    )


def _batches(
    samples: Sequence[TrainingSample],
    weights_N: NDArray[np.float64],
    lengths_N: NDArray[np.int64],
    bins: Sequence[Bin],
) -> list[PackedBatch]:
    """Build the batches of all bins, as views of one array per field over the whole step."""
    # In the order of the bins, so that each batch is a slice of every array and nothing is copied
    # twice.
    order_N = np.concatenate(bins)
    ordered = [samples[i] for i in order_N.tolist()]
    lengths_N = lengths_N[order_N]
    sizes_B = np.array([members.size for members in bins])
    first_B = np.cumsum(sizes_B) - sizes_B
    mask_T = np.concatenate([sample.mask for sample in ordered])
    behavior_T = np.concatenate([sample.behavior_logprobs for sample in ordered], dtype=np.float32)
    # NaN marks tokens that are not trained on; a weight of 0 would not remove it from a sum.
    np.copyto(behavior_T, 0.0, where=~mask_T)
    # In float64, the same for any packing; rounded once, to the dtype of the log-probs.
    weights_T = np.repeat(weights_N[order_N], lengths_N)
    weights_T *= mask_T
    # Steps of 1, and at each sample's first token a step back to 0. Summed in place, this needs no
    # second array of [T].
    positions_T = np.ones(mask_T.size, np.int32)
    positions_T[0] = 0
    positions_T[np.cumsum(lengths_N)[:-1]] = 1 - lengths_N[:-1]
    np.cumsum(positions_T, out=positions_T)
    # Samples count from 0 in each batch, because losses use these numbers as row indices.
    numbers_N = np.arange(len(ordered)) - np.repeat(first_B, sizes_B)
    step = {
        "token_ids_T": np.concatenate([sample.token_ids for sample in ordered], dtype=np.int32),
        "positions_T": positions_T,
        "sequence_ids_T": np.repeat(numbers_N.astype(np.int32), lengths_N),
        "mask_T": mask_T,
        "behavior_logprobs_T": behavior_T,
        "advantages_T": _over_tokens([s.advantage for s in ordered], lengths_N, np.float32),
        "weights_T": weights_T,
        "temperatures_T": _over_tokens([s.temperature for s in ordered], lengths_N, np.float32),
        "versions_T": _over_tokens([s.oldest_version for s in ordered], lengths_N, np.int32),
        **_routes_of(ordered, lengths_N),
    }
    ends_B = np.add.reduceat(lengths_N, first_B).cumsum().tolist()
    origins = iter([sample.origin for sample in ordered])
    return [
        PackedBatch(
            **{name: column_T[start:end] for name, column_T in step.items()},
            origins=tuple(islice(origins, size)),
        )
        for start, end, size in zip([0, *ends_B[:-1]], ends_B, sizes_B.tolist(), strict=True)
    ]


def _routes_of(
    samples: Sequence[TrainingSample], lengths_N: NDArray[np.int64]
) -> dict[str, NDArray[np.int16]]:
    """Return the routes of all tokens as a column, -1 where unknown; None if no sample has any."""
    shape = next((one.routes.shape[1:] for one in samples if one.routes is not None), None)
    if shape is None:
        return {}
    columns = [
        np.full((length, *shape), -1, np.int16) if one.routes is None else one.routes
        for one, length in zip(samples, lengths_N.tolist(), strict=True)
    ]
    return {"routes_TLK": np.concatenate(columns)}


def _over_tokens(
    values_N: Sequence[float], lengths_N: NDArray[np.int64], dtype: type[Scalar]
) -> NDArray[Scalar]:
    """Return [T] the value of each sample, repeated for each of its tokens."""
    return np.repeat(np.array(values_N, dtype=dtype), lengths_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Settings for laying out samples for the ranks of a run."""

    seq_len: int
    """Most tokens in one batch."""
    num_ranks: int
    """Number of ranks with batches of their own; those that share rows count once."""
    hidden_size: int
    """Hidden size of the model, which sets the relative cost of attention."""
    max_tokens: int
    """Most tokens of a completion; the divisor of constant weighting."""
    share_prefixes: bool = False
    """Whether the ranks can compute tokens once that several samples begin with."""


def pack_with(
    samples: Sequence[TrainingSample], weights_N: NDArray[np.float64], packing: Packing
) -> list[list[PackedBatch]]:
    """Return `pack` of `samples` with the settings `packing`."""
    return pack(
        samples,
        weights_N,
        seq_len=packing.seq_len,
        num_ranks=packing.num_ranks,
        hidden_size=packing.hidden_size,
        share_prefixes=packing.share_prefixes,
    )
