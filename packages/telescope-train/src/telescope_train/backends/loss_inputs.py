"""From a PackedBatch and a forward pass to the inputs of a loss, for the trained tokens only."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.algorithms.terms import Terms
from telescope_train.batches.batch import PackedBatch


class LossInputs(NamedTuple):
    """Tensors over the M trained tokens of one batch, on the device of the model."""

    terms: Terms
    weights_M: torch.Tensor
    """[M] the share of each token in the step's loss."""
    same_version_M: torch.Tensor
    """[M] bool, whether the sample was drawn entirely by the weights that are being trained."""


def loss_inputs(
    batch: PackedBatch,
    trained_M: NDArray[np.int64],
    logprobs_M: torch.Tensor,
    entropy_M: torch.Tensor,
    *,
    version: int,
) -> LossInputs:
    """Pick the trained tokens of every column of `batch`; `version` is that of the weights."""
    device = logprobs_M.device

    def column(values_T: NDArray) -> torch.Tensor:
        return torch.tensor(values_T[trained_M]).to(device)

    def optional(values_T: NDArray | None) -> torch.Tensor | None:
        return None if values_T is None else column(values_T)

    terms = Terms(
        logprobs_T=logprobs_M,
        behavior_logprobs_T=column(batch.behavior_logprobs_T),
        advantages_T=column(batch.advantages_T),
        mask_T=column(batch.mask_T),
        sequence_ids_T=column(np.maximum(batch.sequence_ids_T, 0).astype(np.int64)),
        entropy_T=entropy_M,
        proximal_logprobs_T=optional(batch.proximal_logprobs_T),
        reference_logprobs_T=optional(batch.reference_logprobs_T),
    )
    return LossInputs(terms, column(batch.weights_T), column(batch.versions_T == version))
