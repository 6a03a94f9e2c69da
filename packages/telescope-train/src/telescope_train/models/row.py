"""`PackedRow`: one PackedBatch in the form that the model takes, on the model's device.

Dims: T tokens of the row including the padding at its end, M trained tokens, S samples.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.batches.batch import PackedBatch
from telescope_train.models.attention.blocks import (
    Sequences,
    find_sequences,
    find_shared_sequences,
)
from telescope_train.models.attention.prefixes import SharedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The model's view of one PackedBatch."""

    token_ids_T: torch.Tensor
    """[T] int64; tokens that samples share stand once."""
    sequences: Sequences
    """Where the sequences begin and end; padding is one of them."""
    trained_M: torch.Tensor
    """[M] int64, the index in the batch of each trained token."""
    predictors_M: torch.Tensor
    """[M] int64, the index in the row of the token before it. Samples may have it in common."""
    targets_M: torch.Tensor
    """[M] int64, the id of each trained token."""
    temperatures_M: torch.Tensor
    """[M] the sampler's temperature of each trained token."""
    routes_TLK: torch.Tensor | None = None
    """[T, layers, chosen] int64, the experts of each token, -1 where not known; None = of none."""


def packed_row(
    batch: PackedBatch, device: torch.device, *, multiple_of: int = 1, share: bool = True
) -> PackedRow:
    """Prepare `batch` for the model, padded to a multiple of `multiple_of` tokens.

    The batch's own padding is removed. The new padding is a sequence of its own, so no other sees
    it. A row of padding alone keeps two tokens, one of them trained with weight 0, because every
    rank must run the same collectives, forward and backward. Without `share`, tokens that samples
    have in common stand in the row for each of them.
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
    predictors_M, targets_M = trained_M - 1, token_ids_T[trained_M]
    if share and batch.shared_S is not None:
        shared = SharedRow(lengths_S=batch.lengths_S, shared_S=batch.shared_S)
        is_own_T = positions_T >= np.repeat(shared.shared_S, shared.lengths_S)
        token_ids_T, predictors_M = token_ids_T[is_own_T], shared.places()[predictors_M]
        # Padding is one more sample, which shares nothing.
        num_padding = -len(token_ids_T) % multiple_of
        sequences = find_shared_sequences(_padded(shared, num_padding), device)
    else:
        num_padding = -len(token_ids_T) % multiple_of
        padding = np.arange(num_padding, dtype=positions_T.dtype)
        sequences = find_sequences(np.append(positions_T, padding), device)
    # Fixed multiples help kernels, and context parallelism needs slices of equal length.
    token_ids_T = np.append(token_ids_T, np.zeros(num_padding, token_ids_T.dtype))
    return PackedRow(
        token_ids_T=_moved(token_ids_T, device),
        sequences=sequences,
        trained_M=_moved(trained_M, device),
        predictors_M=_moved(predictors_M, device),
        targets_M=_moved(targets_M, device),
        temperatures_M=torch.tensor(batch.temperatures_T[trained_M]).to(device),
        routes_TLK=_routes(batch, len(token_ids_T), device),
    )


def _routes(batch: PackedBatch, num_tokens: int, device: torch.device) -> torch.Tensor | None:
    """Return the routes of a row of `num_tokens`, unknown for its padding."""
    if batch.routes_TLK is None:
        return None
    assert batch.shared_S is None, "mixtures share no prefixes"
    known = batch.routes_TLK[: batch.num_tokens]
    padding = np.full((num_tokens - len(known), *known.shape[1:]), -1, known.dtype)
    return _moved(np.concatenate([known, padding]), device)


def _padded(shared: SharedRow, num_padding: int) -> SharedRow:
    if not num_padding:
        return shared
    return SharedRow(
        lengths_S=np.append(shared.lengths_S, num_padding),
        shared_S=np.append(shared.shared_S, 0),
    )


def _moved(values: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).to(device)
