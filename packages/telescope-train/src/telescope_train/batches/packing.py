"""Lay samples end to end into batches of at most `seq_len` tokens, the same number on every rank.

The plan is made on lengths alone, then every array is built by one concatenation over the whole
step and cut into views: no Python runs per token. Attention and positions restart at each sample,
so how samples are packed changes time and memory, never the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import ConfigError
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.binning import Bin, deal, spread_over_ranks

Scalar = TypeVar("Scalar", bound=np.generic)

PADDING_TOKENS = 8
"""Length of a batch without samples: ranks must take the same number of steps together."""


def pack(
    samples: Sequence[TrainingSample],
    weights_N: NDArray[np.float64],
    *,
    seq_len: int,
    num_ranks: int,
    hidden_size: int = 1024,
) -> list[list[PackedBatch]]:
    """Return the batches of each rank, equally many, in the order they are to be run.

    `weights_N` is the weight of each trained token of sample n (`weighting.token_weights`). The
    k-th batches of all ranks cost about the same, because ranks wait for each other in each.
    `hidden_size` sets how much attention costs beside the rest. No samples give no batches.
    Raises ConfigError for a sample longer than `seq_len`.
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
    bins = spread_over_ranks(lengths_N, seq_len=seq_len, num_ranks=num_ranks)
    ranks = deal(bins, lengths_N, num_ranks=num_ranks, hidden_size=hidden_size)
    filled = iter(_batches(samples, weights_N, lengths_N, [b for r in ranks for b in r if b.size]))
    return [[next(filled) if b.size else padding_batch() for b in rank] for rank in ranks]


def packing_fill(batches: Sequence[PackedBatch], seq_len: int) -> float:
    """Return the share of `seq_len` that is used, over all batches that hold samples."""
    num_tokens = [batch.num_tokens for batch in batches if batch.num_tokens]
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
        weights_T=np.zeros(size, np.float32),
        temperatures_T=np.ones(size, np.float32),
        versions_T=np.full(size, -1, np.int32),
    )


def _batches(
    samples: Sequence[TrainingSample],
    weights_N: NDArray[np.float64],
    lengths_N: NDArray[np.int64],
    bins: Sequence[Bin],
) -> list[PackedBatch]:
    """Build the batches of all bins: one array per field over the whole step, then views of it."""
    order_N = np.concatenate(bins)
    ordered = [samples[i] for i in order_N.tolist()]
    lengths_N = lengths_N[order_N]
    sizes_B = np.array([members.size for members in bins])
    first_B = np.cumsum(sizes_B) - sizes_B
    mask_T = np.concatenate([sample.mask for sample in ordered])
    behavior_T = np.concatenate([sample.behavior_logprobs for sample in ordered], dtype=np.float32)
    np.copyto(behavior_T, 0.0, where=~mask_T)
    weights_T = np.repeat(weights_N[order_N].astype(np.float32), lengths_N)
    weights_T *= mask_T
    # Steps of 1, and at each sample's first token one back to 0: summed in place, no other array.
    positions_T = np.ones(mask_T.size, np.int32)
    positions_T[0] = 0
    positions_T[np.cumsum(lengths_N)[:-1]] = 1 - lengths_N[:-1]
    np.cumsum(positions_T, out=positions_T)
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
    }
    ends_B = np.add.reduceat(lengths_N, first_B).cumsum().tolist()
    return [
        PackedBatch(**{name: column_T[start:end] for name, column_T in step.items()})
        for start, end in zip([0, *ends_B[:-1]], ends_B, strict=True)
    ]


def _over_tokens(
    values_N: Sequence[float], lengths_N: NDArray[np.int64], dtype: type[Scalar]
) -> NDArray[Scalar]:
    """Repeat the value of each sample over its tokens."""
    return np.repeat(np.array(values_N, dtype=dtype), lengths_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How samples are laid out for the ranks of a run."""

    seq_len: int
    num_ranks: int
    hidden_size: int
    """Sets how much attention costs beside the rest."""
    max_tokens: int
    """Longest completion; the divisor of constant weighting."""
