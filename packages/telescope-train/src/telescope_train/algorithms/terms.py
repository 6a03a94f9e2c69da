"""What a loss is given and what it returns, and the metrics that every loss shares.

All `[T]`, float32, aligned with the token they describe. Nothing here is reduced: the backend
multiplies by the weights and sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from telescope_train.metrics import MetricSum, MetricSums

MAX_LOG_RATIO = 80.0
"""exp() of more overflows float32. A token beyond it is left without a gradient, not with NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The inputs of a token loss."""

    logprobs_T: Tensor
    """[T] of the policy being trained, nats; requires grad. 0 where the mask is False."""
    behavior_logprobs_T: Tensor
    """[T] of what the sampler sampled from, nats. 0 where the mask is False."""
    advantages_T: Tensor
    mask_T: Tensor
    """[T] bool, True where the policy wrote the token."""
    sequence_ids_T: Tensor
    """[T] int64, the sample of each token, counted from 0 in this batch."""
    entropy_T: Tensor
    """[T] of the policy's distribution, nats; requires grad where `entropy_coef` is above 0."""
    proximal_logprobs_T: Tensor | None = None
    """[T] recomputed by the trainer before the first optimiser step of the batch, nats."""
    reference_logprobs_T: Tensor | None = None
    """[T] of the reference model, nats."""

    @property
    def log_ratios_T(self) -> Tensor:
        """[T] log of policy over sampler, 0 where the mask is False; differentiable."""
        zeros_T = torch.zeros_like(self.logprobs_T)
        log_ratios_T = torch.where(self.mask_T, self.logprobs_T - self.behavior_logprobs_T, zeros_T)
        return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The outputs of a token loss."""

    loss_T: Tensor
    """[T] unweighted; 0 where the mask is False."""
    metrics: MetricSums = field(default_factory=dict[str, MetricSum])


def metric_sums(values: Mapping[str, Tensor], mask_T: Tensor) -> dict[str, MetricSum]:
    """Sum each `[T]` of `values` where the mask is True, with one copy to the host for all."""
    if not values:
        return {}
    values_KT = torch.stack([value.detach().double() for value in values.values()])
    rows = torch.stack(
        [
            values_KT.masked_fill(~mask_T, 0.0).sum(1),
            mask_T.sum().double().expand(len(values_KT)),
            values_KT.masked_fill(~mask_T, torch.inf).amin(1),
            values_KT.masked_fill(~mask_T, -torch.inf).amax(1),
        ],
        dim=1,
    ).tolist()
    return {
        name: MetricSum(total=total, count=count, lowest=lowest, highest=highest)
        for name, (total, count, lowest, highest) in zip(values, rows, strict=True)
    }


def shared_metrics(terms: Terms, *, same_version_T: Tensor) -> MetricSums:
    """Return what every algorithm reports of a forward pass.

    `importance_weight`: policy over sampler. `mismatch` = |l - b| and `mismatch/k3`: how far the
    trainer and the engine are apart on tokens of the version being trained (`same_version_T`),
    where they should agree.
    """
    log_ratios_T = terms.log_ratios_T.detach().double()
    ratios_T = log_ratios_T.exp()
    everywhere = {"importance_weight": ratios_T, "entropy": terms.entropy_T}
    engine = {"mismatch": log_ratios_T.abs(), "mismatch/k3": ratios_T - 1 - log_ratios_T}
    return metric_sums(everywhere, terms.mask_T) | metric_sums(
        engine, terms.mask_T & same_version_T
    )
