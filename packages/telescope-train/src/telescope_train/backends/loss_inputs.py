"""From a PackedBatch and a forward pass to the inputs of a loss, for the trained tokens only.

And after the backward pass, to what it found of each of these tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.algorithms.terms import Terms
from telescope_train.backends.protocol import BatchFacts
from telescope_train.batches.batch import PackedBatch
from telescope_train.models.moving import to_device


class LossInputs(NamedTuple):
    """Tensors over the M trained tokens of one batch, on the device of the model."""

    terms: Terms
    weights_M: torch.Tensor
    """[M] the share of each token in the step's loss."""
    same_version_M: torch.Tensor
    """[M] bool, whether the sample was drawn only with the weights that are being trained."""


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
        return to_device(values_T[trained_M], device)

    def optional(values_T: NDArray | None) -> torch.Tensor | None:
        return None if values_T is None else column(values_T)

    # Counted anew, as samples without a trained token leave gaps.
    ids_M = np.unique(batch.sequence_ids_T[trained_M], return_inverse=True)[1]
    terms = Terms(
        logprobs_T=logprobs_M,
        behavior_logprobs_T=column(batch.behavior_logprobs_T),
        advantages_T=column(batch.advantages_T),
        mask_T=column(batch.mask_T),
        sequence_ids_T=to_device(ids_M, device, torch.long),
        entropy_T=entropy_M,
        proximal_logprobs_T=optional(batch.proximal_logprobs_T),
        reference_logprobs_T=optional(batch.reference_logprobs_T),
    )
    weights_M = to_device(batch.weights_T[trained_M], device, logprobs_M.dtype)
    return LossInputs(terms, weights_M, column(batch.versions_T == version))


def batch_facts(inputs: LossInputs) -> BatchFacts:
    """Return log-probs, entropies and effective advantages of a row after its backward pass."""
    terms, gradient_M = inputs.terms, inputs.terms.logprobs_T.grad
    assert gradient_M is not None, "retain_grad and backward come first"
    # A row of padding has one token that is trained only so that all ranks run backward.
    kept_M = terms.mask_T
    # The weights multiply what follows from the advantage, and are known without the ranks.
    pushed_M = -gradient_M[kept_M] / inputs.weights_M[kept_M]
    limit = float(np.finfo(np.float16).max)
    rounded_2M = torch.stack([terms.entropy_T.detach()[kept_M], pushed_M]).clamp(-limit, limit)
    entropy_M, effective_M = rounded_2M.half().cpu().numpy()
    return BatchFacts(
        logprobs_M=terms.logprobs_T.detach()[kept_M].float().cpu().numpy(),
        entropy_M=entropy_M,
        effective_advantages_M=effective_M,
    )
