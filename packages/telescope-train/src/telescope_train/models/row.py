"""`PackedRow`: one PackedBatch in the form that the model takes, on the model's device.

Dims: T tokens of the row including the padding at its end, M trained tokens, S sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch

from telescope_train.batches.batch import PackedBatch
from telescope_train.models.attention.blocks import Sequences, find_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The model's view of one PackedBatch."""

    token_ids_T: torch.Tensor
    """[T] int64."""
    sequences: Sequences
    """Where the S sequences begin and end; padding is one of them."""
    trained_M: torch.Tensor
    """[M] int64, the index in the row of each trained token."""
    temperatures_M: torch.Tensor
    """[M] the sampler's temperature of each trained token."""


def packed_row(batch: PackedBatch, device: torch.device, *, multiple_of: int = 1) -> PackedRow:
    """Prepare `batch` for the model, padded to a multiple of `multiple_of` tokens.

    The batch's own padding is removed. The new padding is a sequence of its own, so no other sees
    it. A row of padding alone keeps two tokens, one of them trained with weight 0, because every
    rank must run the same collectives, forward and backward.
    """
    num_tokens = batch.num_tokens
    trained_M = np.flatnonzero(batch.mask_T)
    token_ids_T, positions_T = batch.token_ids_T[:num_tokens], batch.positions_T[:num_tokens]
    # Two, because a trained token needs one before it.
    if num_tokens == 0:
        token_ids_T, positions_T = batch.token_ids_T[:2], np.arange(2)
    if len(trained_M) == 0:
        trained_M = np.flatnonzero(positions_T > 0)[:1]
    assert (positions_T[trained_M] > 0).all(), (
        "the first token of a sample has nothing to be predicted from: it cannot be trained"
    )
    # Fixed multiples help kernels, and context parallelism needs slices of equal length.
    num_padding = -len(token_ids_T) % multiple_of
    token_ids_T = np.append(token_ids_T, np.zeros(num_padding, token_ids_T.dtype))
    positions_T = np.append(positions_T, np.arange(num_padding, dtype=positions_T.dtype))
    return PackedRow(
        token_ids_T=torch.tensor(token_ids_T, dtype=torch.long).to(device),
        sequences=find_sequences(positions_T, device),
        trained_M=torch.from_numpy(trained_M).to(device),
        temperatures_M=torch.tensor(batch.temperatures_T[trained_M]).to(device),
    )
