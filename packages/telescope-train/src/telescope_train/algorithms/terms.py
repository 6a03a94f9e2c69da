"""What a loss is given and what it returns, and the metrics that every loss shares.

All `[T]`, float32, aligned with the token they describe. Nothing here is reduced: the backend
multiplies by the weights and sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from telescope_train.metrics import MetricSum, MetricSums

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 80.0
"""exp() of more overflows float32. A token beyond it is left without a gradient, not with NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The inputs of a token loss."""

    logprobs_T: "Tensor"
    """[T] of the policy being trained, nats; requires grad. 0 where the mask is False."""
    behavior_logprobs_T: "Tensor"
    """[T] of what the sampler sampled from, nats. 0 where the mask is False."""
    advantages_T: "Tensor"
    mask_T: "Tensor"
    """[T] bool, True where the policy wrote the token."""
    sequence_ids_T: "Tensor"
    """[T] int64, the sample of each token, counted from 0 in this batch."""
    entropy_T: "Tensor"
    """[T] of the policy's distribution, nats; requires grad where `entropy_coef` is above 0."""
    proximal_logprobs_T: "Tensor | None" = None
    """[T] recomputed by the trainer before the first optimiser step of the batch, nats."""
    reference_logprobs_T: "Tensor | None" = None
    """[T] of the reference model, nats."""

    @property
    def log_ratios_T(self) -> "Tensor":
        """[T] log of policy over sampler; differentiable."""
        return self.difference(self.logprobs_T, self.behavior_logprobs_T)

    def difference(self, of_T: "Tensor", to_T: "Tensor") -> "Tensor":
        """Return of_T - to_T, held within what exp() can take."""
        return (of_T - to_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The outputs of a token loss."""

    loss_T: "Tensor"
    """[T] unweighted; what stands where the mask is False is not used."""
    metrics: MetricSums = field(default_factory=dict[str, MetricSum])


def metric_sums(values: "Mapping[str, Tensor]", mask_T: "Tensor") -> dict[str, MetricSum]:
    """Sum each `[T]` of `values` where the mask is True, with one copy to the host for all.

    A bool counts as 0 or 1.
    """
    if not values:
        return {}
    import torch

    is_whole = bool(mask_T.all())
    rows = [_row(value.detach(), None if is_whole else mask_T) for value in values.values()]
    return {
        name: MetricSum(total=total, count=count, lowest=lowest, highest=highest)
        for name, (total, count, lowest, highest) in zip(
            values, torch.stack(rows).tolist(), strict=True
        )
    }


def _row(value_T: "Tensor", mask_T: "Tensor | None") -> "Tensor":
    """Return total, count, lowest and highest; the last two infinite where nothing counts.

    No mask = all count, which is the rule in training and several times faster.
    """
    import torch

    kept_T = value_T if mask_T is None else value_T[mask_T]
    count = torch.tensor(kept_T.numel(), dtype=torch.float64, device=kept_T.device)
    if not kept_T.numel():
        return torch.tensor([0, 0, torch.inf, -torch.inf], dtype=torch.float64).to(kept_T.device)
    if kept_T.dtype == torch.bool:
        total = kept_T.count_nonzero().double()
        return torch.stack([total, count, (total == count).double(), (total > 0).double()])
    lowest, highest = kept_T.aminmax()
    return torch.stack([kept_T.sum().double(), count, lowest.double(), highest.double()])


def shared_metrics(terms: Terms, *, same_version_T: "Tensor") -> MetricSums:
    """Return what every algorithm reports of a forward pass.

    `importance_weight`: policy over the proximal policy where that was recomputed, else over the
    sampler. `behave_imp_weight`: proximal policy over sampler. `effective_sample_size/...`: sums of
    policy over sampler and of its square, from which `metric_row` makes the fraction.
    `mismatch` = |l - b| and `mismatch/k3`: how far the trainer and the engine are apart on tokens
    of the version being trained (`same_version_T`), where they should agree.
    """
    log_ratios_T = terms.log_ratios_T.detach()
    ratios_T = log_ratios_T.exp()
    everywhere = {"importance_weight": ratios_T, "entropy": terms.entropy_T}
    if terms.proximal_logprobs_T is not None:
        proximal_T = terms.proximal_logprobs_T
        drift_T = terms.difference(terms.logprobs_T.detach(), proximal_T)
        behave_T = terms.difference(proximal_T, terms.behavior_logprobs_T)
        everywhere |= {"importance_weight": drift_T.exp(), "behave_imp_weight": behave_T.exp()}
    if terms.reference_logprobs_T is not None:
        gap_T = terms.difference(terms.reference_logprobs_T, terms.logprobs_T.detach())
        everywhere["kl/reference"] = gap_T.expm1() - gap_T
    sample_size = {
        "effective_sample_size/weight": ratios_T,
        "effective_sample_size/square": ratios_T.double().square(),
    }
    engine = {"mismatch": log_ratios_T.abs(), "mismatch/k3": log_ratios_T.expm1() - log_ratios_T}
    return metric_sums(everywhere | sample_size, terms.mask_T) | metric_sums(
        engine, terms.mask_T & same_version_T
    )
