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
from telescope_train.models.moving import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The model's view of one PackedBatch."""

    token_ids_T: torch.Tensor
    """[T] int64; tokens that samples share are stored once."""
    sequences: Sequences
    """The borders of the sequences; padding is one of them."""
    trained_M: NDArray[np.int64]
    """[M], the index in the batch of each trained token; on the host, where it is used."""
    predictors_M: torch.Tensor
    """[M] int64, the index in the row of the token before it, which samples may share."""
    host_predictors_M: NDArray[np.int64]
    """The same in the memory of the host, for code that reads them: on a GPU it would wait."""
    targets_M: torch.Tensor
    """[M] int64, the id of each trained token."""
    temperatures_M: torch.Tensor
    """[M] the sampler's temperature of each trained token."""
    routes_TLK: torch.Tensor | None = None
    """[T, layers, chosen] int64, the experts of each token, -1 if not known; None = no routes."""


def require_known_tokens(token_ids: NDArray[np.integer], vocab_size: int) -> None:
    """Raise ValueError for token ids that a model of `vocab_size` does not have.

    Before they are on a GPU, where the answer would have to be waited for.
    """
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(
            f"expected token ids from 0 to {vocab_size - 1}, got {token_ids.min()} to "
            f"{token_ids.max()}; the samples come from a model with a larger vocabulary"
        )


def packed_row(
    batch: PackedBatch, device: torch.device, *, multiple_of: int = 1, share: bool = True
) -> PackedRow:
    """Prepare `batch` for the model, padded to a multiple of `multiple_of` tokens.

    The batch's own padding is removed. The new padding is a separate sequence, so no other sees it.
    A row of only padding keeps two tokens, one of them trained with weight 0, because every rank
    must run the same collectives, forward and backward. Without `share`, the common tokens of
    samples are repeated in the row for each sample.
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
        token_ids_T=to_device(token_ids_T, device, torch.long),
        sequences=sequences,
        trained_M=trained_M,
        predictors_M=to_device(predictors_M, device, torch.long),
        host_predictors_M=np.asarray(predictors_M, np.int64),
        targets_M=to_device(targets_M, device, torch.long),
        temperatures_M=to_device(batch.temperatures_T[trained_M], device),
        routes_TLK=_routes(batch, len(token_ids_T), device),
    )


def _routes(batch: PackedBatch, num_tokens: int, device: torch.device) -> torch.Tensor | None:
    """Return the routes of a row of `num_tokens`, unknown for its padding."""
    if batch.routes_TLK is None:
        return None
    assert batch.shared_S is None, "mixtures share no prefixes"
    known = batch.routes_TLK[: batch.num_tokens]
    padding = np.full((num_tokens - len(known), *known.shape[1:]), -1, known.dtype)
    return to_device(np.concatenate([known, padding]), device, torch.long)


def _padded(shared: SharedRow, num_padding: int) -> SharedRow:
    if not num_padding:
        return shared
    return SharedRow(
        lengths_S=np.append(shared.lengths_S, num_padding),
        shared_S=np.append(shared.shared_S, 0),
    )
