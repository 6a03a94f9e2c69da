"""A packed row in the form that Megatron's ranks take: padded, and cut for one rank.

Context-parallel ranks divide every sequence into twice as many chunks as there are ranks, and rank
r takes chunks r and 2n - 1 - r, because the library's rotary embedding expects this order. Dims: T
tokens of the padded row, C tokens of one rank, M trained tokens, P those of them that are predicted
from a token of this rank.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.batches.batch import PackedBatch
from telescope_train.models.attention.blocks import Sequences, find_sequences
from telescope_train.models.moving import to_device
from telescope_train.models.row import PackedRow, packed_row


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOrder:
    """The order of tokens in the row, and in the ranks one after the other."""

    ranks_from_row: torch.Tensor
    """[T] int64: entry i is the position in the row of token i of all ranks."""
    row_from_ranks: torch.Tensor
    """[T] int64, the inverse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """The part of a row that one rank sees, and the tokens that it predicts."""

    token_ids_C: torch.Tensor
    """[C] int64."""
    sequences: Sequences
    """The sequences of the whole row."""
    starts: torch.Tensor
    """[S + 1] int32, their borders, where the library's layers read them: rotations on the host, in
    every layer, and Transformer Engine's attention on the GPU."""
    order: ContextOrder | None
    """None = this rank has the whole row."""
    trained_M: NDArray[np.int64]
    """[M] position of each trained token in the batch."""
    predictors_P: torch.Tensor
    """[P] int64, positions among this rank's tokens."""
    places_P: torch.Tensor
    """[P] int64, positions among the M trained tokens."""
    targets_P: torch.Tensor
    """[P] int64, the trained tokens."""
    temperatures_P: torch.Tensor
    """[P] the sampler's temperatures."""


def rank_row(
    batch: PackedBatch,
    device: torch.device,
    *,
    ranks: int,
    rank: int,
    multiple_of: int,
    engine_attends: bool = False,
) -> RankRow:
    """Prepare `batch` for context-parallel rank `rank` of `ranks`.

    `engine_attends`: the attention is Transformer Engine's, and not Telescope's.

    The row is padded to a multiple of `multiple_of` tokens, which `2 * ranks` must divide if there
    is more than one rank. Tokens that samples share stand in it once.
    """
    if batch.shared_S is not None:
        assert ranks == 1, "context-parallel ranks share no prefixes"
        return _shared_row(packed_row(batch, device, multiple_of=multiple_of))
    cpu = torch.device("cpu")
    plain = packed_row(batch, cpu, share=False)
    starts = plain.sequences.starts.numpy()
    chunk = 2 * ranks if ranks > 1 else 1
    places, positions = _padded(starts, chunk=chunk, multiple_of=multiple_of)
    ids_T = np.zeros(len(positions), np.int64)
    ids_T[places] = plain.token_ids_T.numpy()
    trained_M = plain.trained_M
    in_row_M = places[trained_M]
    sequences = find_sequences(positions, device)
    order, local_T = None, np.arange(len(positions))
    mine = local_T
    if ranks > 1:
        whole = context_order(sequences.host_starts.numpy(), ranks)
        inverse = np.argsort(whole)
        order = ContextOrder(
            ranks_from_row=to_device(whole, device),
            row_from_ranks=to_device(inverse, device),
        )
        size = len(positions) // ranks
        mine = whole[rank * size : (rank + 1) * size]
        local_T = inverse - rank * size
    predictors_M = local_T[in_row_M - 1]
    chosen = np.flatnonzero((predictors_M >= 0) & (predictors_M < len(mine)))
    return RankRow(
        token_ids_C=to_device(ids_T[mine], device),
        sequences=sequences,
        starts=sequences.starts if engine_attends else sequences.host_starts,
        order=order,
        trained_M=trained_M,
        predictors_P=to_device(predictors_M[chosen], device),
        places_P=to_device(chosen, device),
        targets_P=to_device(ids_T[in_row_M[chosen]], device),
        temperatures_P=plain.temperatures_M[torch.from_numpy(chosen)].to(device),
    )


def _shared_row(row: PackedRow) -> RankRow:
    return RankRow(
        token_ids_C=row.token_ids_T,
        sequences=row.sequences,
        starts=row.sequences.host_starts,
        order=None,
        trained_M=row.trained_M,
        predictors_P=row.predictors_M,
        places_P=torch.arange(len(row.trained_M), device=row.token_ids_T.device),
        targets_P=row.targets_M,
        temperatures_P=row.temperatures_M,
    )


def _padded(
    starts: NDArray[np.int32], *, chunk: int, multiple_of: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the new position of each token, and the positions of the padded row.

    Every sequence is padded at its end to a multiple of `chunk`. If the row is still too short, it
    gets one more sequence that is all padding.
    """
    lengths = np.diff(starts)
    padded = -(-lengths // chunk) * chunk
    firsts = np.append(0, padded.cumsum())
    places = np.concatenate(
        [first + np.arange(length) for first, length in zip(firsts[:-1], lengths, strict=True)]
    )
    rest = -int(firsts[-1]) % multiple_of
    sizes = [*padded, rest] if rest else list(padded)
    return places, np.concatenate([np.arange(size) for size in sizes])


def context_order(starts: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """Return the row positions of the tokens of rank 0, then of rank 1, and so on."""
    order: list[NDArray[np.int64]] = []
    for rank in range(ranks):
        for first, last in pairwise(starts):
            width = (last - first) // (2 * ranks)
            for chunk in (rank, 2 * ranks - 1 - rank):
                order.append(np.arange(first + chunk * width, first + (chunk + 1) * width))
    return np.concatenate(order).astype(np.int64)
