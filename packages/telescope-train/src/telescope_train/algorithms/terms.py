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
        """[T] log of policy over sampler, 0 where the mask is False; differentiable."""
        return self.difference(self.logprobs_T, self.behavior_logprobs_T)

    def difference(self, of_T: "Tensor", to_T: "Tensor") -> "Tensor":
        """Return of_T - to_T, 0 where the mask is False, within what exp() can take."""
        difference_T = (of_T - to_T).masked_fill(~self.mask_T, 0.0)
        return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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

    # Backends give trained tokens alone: then half of the passes over memory are left out.
    row = _whole_row if bool(mask_T.all()) and mask_T.numel() else _row
    rows = torch.stack([row(value.detach(), mask_T) for value in values.values()]).tolist()
    return {
        name: MetricSum(total=total, count=count, lowest=lowest, highest=highest)
        for name, (total, count, lowest, highest) in zip(values, rows, strict=True)
    }


def _row(value_T: "Tensor", mask_T: "Tensor") -> "Tensor":
    """Return total, count, lowest and highest; the last two infinite where nothing counts."""
    import torch

    count = mask_T.sum().double()
    if value_T.dtype == torch.bool:
        total = (value_T & mask_T).sum().double()
        lowest, highest = (total == count).double(), (total > 0).double()
        lowest, highest = lowest.where(count > 0, torch.inf), highest.where(count > 0, -torch.inf)
        return torch.stack([total, count, lowest, highest])
    out_T = ~mask_T
    total = value_T.masked_fill(out_T, 0.0).sum(dtype=torch.float64)
    lowest = value_T.masked_fill(out_T, torch.inf).amin().double()
    highest = value_T.masked_fill(out_T, -torch.inf).amax().double()
    return torch.stack([total, count, lowest, highest])


def _whole_row(value_T: "Tensor", mask_T: "Tensor") -> "Tensor":
    """Return what `_row` returns where the mask is True everywhere."""
    import torch

    if value_T.dtype == torch.bool:
        parts = [value_T.sum(), value_T.new_tensor(value_T.numel(), dtype=torch.int64)]
        parts += [value_T.all(), value_T.any()]
    else:
        total = value_T.sum(dtype=torch.float64)
        parts = [total, value_T.new_tensor(value_T.numel(), dtype=torch.float64)]
        parts += value_T.aminmax()
    return torch.stack([part.double() for part in parts])


def shared_metrics(terms: Terms, *, same_version_T: "Tensor") -> MetricSums:
    """Return what every algorithm reports of a forward pass.

    `importance_weight`: policy over the proximal policy where that was recomputed, else over the
    sampler. `behave_imp_weight`: proximal policy over sampler. `effective_sample_size/...`: sums of
    policy over sampler and of its square, from which `metric_row` makes the fraction.
    `mismatch` = |l - b| and `mismatch/k3`: how far the trainer and the engine are apart on tokens
    of the version being trained (`same_version_T`), where they should agree.
    """
    log_ratios_T = terms.log_ratios_T.detach().double()
    ratios_T = log_ratios_T.exp()
    everywhere = {"importance_weight": ratios_T, "entropy": terms.entropy_T}
    if terms.proximal_logprobs_T is not None:
        proximal_T = terms.proximal_logprobs_T
        drift_T = terms.difference(terms.logprobs_T.detach(), proximal_T).double()
        behave_T = terms.difference(proximal_T, terms.behavior_logprobs_T).double()
        everywhere |= {"importance_weight": drift_T.exp(), "behave_imp_weight": behave_T.exp()}
    if terms.reference_logprobs_T is not None:
        gap_T = terms.difference(terms.reference_logprobs_T, terms.logprobs_T.detach()).double()
        everywhere["kl/reference"] = gap_T.exp() - 1 - gap_T
    sample_size = {
        "effective_sample_size/weight": ratios_T,
        "effective_sample_size/square": ratios_T.square(),
    }
    engine = {"mismatch": log_ratios_T.abs(), "mismatch/k3": ratios_T - 1 - log_ratios_T}
    return metric_sums(everywhere | sample_size, terms.mask_T) | metric_sums(
        engine, terms.mask_T & same_version_T
    )
