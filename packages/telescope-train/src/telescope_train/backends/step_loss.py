"""`StepLoss`: the loss of the rows of a step, one after the other, the same for every backend.

A backend runs its model over a row and differentiates the result of `of_row`. Its metrics are read
after the backward pass, so that nothing waits for a GPU before. Dims: M trained tokens of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.algorithms.terms import Terms, TokenLoss, metric_sums, shared_metrics
from telescope_train.algorithms.token_metrics import MetricSum, reduce_metrics
from telescope_train.backends.fsdp.sharding import gather_values
from telescope_train.backends.protocol import BatchFacts
from telescope_train.backends.trainer_backend import GradientResult, Loss
from telescope_train.batches.batch import PackedBatch
from telescope_train.models.moving import to_device
from telescope_train.models.packed import TrainedLogprobs


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


class StepLoss:
    """Sums losses and metrics of rows; only `after_backward` reads them, which waits for a GPU."""

    def __init__(self, loss: Loss, *, version: int, records_facts: bool) -> None:
        """`version`: of the present weights. `records_facts`: keep facts about each token."""
        self._loss = loss
        self._version = version
        self._records_facts = records_facts
        self._waiting: list[tuple[LossInputs, TokenLoss, torch.Tensor]] = []
        """Rows whose loss was returned and may not have had their backward pass yet."""
        self._total = 0.0
        self._metrics: list[dict[str, MetricSum]] = []
        self.facts: list[BatchFacts] = []
        """Facts of each row in the order of `of_row`, if they are recorded."""

    def of_row(
        self, batch: PackedBatch, trained_M: NDArray[np.int64], found: TrainedLogprobs
    ) -> torch.Tensor:
        """Return the loss of a row, its share of the loss of the step, to be differentiated."""
        inputs = loss_inputs(
            batch, trained_M, found.logprobs_M, found.entropy_M, version=self._version
        )
        if self._records_facts:
            found.logprobs_M.retain_grad()
        token_loss = self._loss(inputs.terms)
        # A sum: rows and ranks are added up without dividing, as the weights hold the only
        # denominator.
        loss = (token_loss.loss_T * inputs.weights_M).sum()
        self._waiting.append((inputs, token_loss, loss.detach()))
        return loss

    def after_backward(self) -> None:
        """Read the numbers of rows whose backward pass is done."""
        waiting, self._waiting = self._waiting, []
        for inputs, token_loss, loss in waiting:
            own = metric_sums(token_loss.metrics, inputs.terms.mask_T)
            shared = shared_metrics(inputs.terms, same_version_T=inputs.same_version_M)
            self._metrics.append({**own, **shared})
            self._total += loss.item()
            if self._records_facts:
                self.facts.append(batch_facts(inputs))

    def add_metrics(self, metrics: dict[str, MetricSum]) -> None:
        """Add metrics that a backend has measured itself."""
        self._metrics.append(metrics)

    def over_ranks(self, speakers: Sequence[int], *, facts: Sequence[BatchFacts]) -> GradientResult:
        """Return the sums over all ranks: one collective, whatever the number of rows.

        `speakers`: one rank of each group that shares rows, whose numbers are the same. `facts`:
        of the rows of this rank.
        """
        assert not self._waiting, "after_backward comes first"
        every = gather_values((self._total, reduce_metrics(self._metrics)))
        per_shard = [every[rank] for rank in speakers]
        return GradientResult(
            loss=sum(loss for loss, _ in per_shard),
            metrics=reduce_metrics(metrics for _, metrics in per_shard),
            token_facts=facts,
        )


def in_batch(
    batch: PackedBatch, trained_M: NDArray[np.int64], values_M: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return [T] `values_M` at the trained tokens, and 0 elsewhere."""
    values_T = np.zeros(len(batch.token_ids_T), dtype=np.float32)
    values_T[trained_M] = values_M
    # A row of padding has one token that is trained only so that all ranks run backward.
    values_T[~batch.mask_T] = 0.0
    return values_T
