"""The inputs and outputs of a loss, ratios of its probabilities, and metrics that all losses share.

All tensors are `[T]` and float32 unless stated otherwise, aligned with the token they describe.
No loss is reduced here: the backend multiplies by the weights and sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from telescope_train.algorithms.token_metrics import SPREAD, MetricSum, MetricSums

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


MAX_LOG_RATIO = 80.0
"""Nats; exp() of 89 overflows float32. A token beyond the limit gets no gradient instead of NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The inputs of a token loss."""

    logprobs_T: "Tensor"
    """[T] of the policy being trained, nats; requires grad. 0 where the mask is False."""
    behavior_logprobs_T: "Tensor"
    """[T] of the sampler's distribution, nats. 0 where the mask is False."""
    advantages_T: "Tensor"
    """[T] the advantage of the token's rollout."""
    mask_T: "Tensor"
    """[T] bool, True where the policy wrote the token."""
    sequence_ids_T: "Tensor"
    """[T] int64, the sample of each token, counted from 0 without gaps."""
    entropy_T: "Tensor"
    """[T] of the policy's distribution, nats; requires grad where `entropy_coef` is above 0."""
    proximal_logprobs_T: "Tensor | None" = None
    """[T] recomputed by the trainer before the first optimizer step of the batch, nats."""
    reference_logprobs_T: "Tensor | None" = None
    """[T] of the reference model, nats."""

    @property
    def log_ratios_T(self) -> "Tensor":
        """[T], nats: log of policy over sampler; differentiable."""
        return self.difference(self.logprobs_T, self.behavior_logprobs_T)

    def difference(self, of_T: "Tensor", to_T: "Tensor") -> "Tensor":
        """Return of_T - to_T, clamped to the range in which exp() is finite and above 0."""
        return (of_T - to_T).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The outputs of a token loss."""

    loss_T: "Tensor"
    """[T], unweighted; values where the mask is False are not used."""
    metrics: "Mapping[str, Tensor]" = field(default_factory=dict[str, "Tensor"])
    """[T] values of each metric, a bool counting as 0 or 1. They are summed over the trained tokens
    when the backward pass is over, so that nobody waits for a GPU before that."""


def above(values_T: "Tensor", limit: float) -> "Tensor":
    """Return [T] 1 where a value is above `limit`, else 0, as floats.

    Comparing to a bool tensor, and where() with it, take four to forty times as long on a CPU.
    """
    return values_T.detach().clone().gt_(limit)


def below(values_T: "Tensor", limit: float) -> "Tensor":
    """Return [T] 1 where a value is below `limit`, else 0, as floats."""
    return values_T.detach().clone().lt_(limit)


def all_true(mask_T: "Tensor") -> bool:
    """Return whether surely every token is trained on, which is the usual case in training.

    Always False for a mask on a GPU, because reading it would wait for the GPU.
    """
    import torch

    # all() of bytes is 20 times as fast as that of bools.
    return mask_T.device.type == "cpu" and bool(mask_T.view(torch.uint8).all())


def metric_sums(values: "Mapping[str, Tensor]", mask_T: "Tensor") -> dict[str, MetricSum]:
    """Sum each `[T]` of `values` where the mask is True, on the host.

    A GPU gives each in one copy; to sum there it would be asked 6 times as often. A bool counts as
    0 or 1. Lowest and highest are computed for the names in `SPREAD` only.
    """
    if not values:
        return {}
    import torch

    mask_T = mask_T.cpu()
    kept_T = None if all_true(mask_T) else mask_T
    rows = [_row(value.detach().cpu(), kept_T, name in SPREAD) for name, value in values.items()]
    return {
        name: MetricSum(total=total, count=count, lowest=lowest, highest=highest)
        for name, (total, count, lowest, highest) in zip(
            values, torch.stack(rows).tolist(), strict=True
        )
    }


def _row(value_T: "Tensor", mask_T: "Tensor | None", has_spread: bool) -> "Tensor":
    """Return [4] total, count, lowest and highest; without a mask every token counts.

    If no token counts, lowest and highest are inf and -inf, so that merging ignores them. Without
    `has_spread` they are -inf and inf, because nobody reads them.
    """
    import torch

    kept_T = value_T if mask_T is None else value_T[mask_T]
    count = torch.tensor(kept_T.numel(), dtype=torch.float64)
    if not kept_T.numel():
        return torch.tensor([0, 0, torch.inf, -torch.inf], dtype=torch.float64)
    total = kept_T.count_nonzero() if kept_T.dtype == torch.bool else kept_T.sum()
    bounds = torch.stack(kept_T.aminmax()) if has_spread else count.new_tensor([-inf, inf])
    return torch.cat([torch.stack([total.double(), count]), bounds.double()])


def shared_metrics(terms: Terms, *, same_version_T: "Tensor") -> MetricSums:
    """Return the metrics that every algorithm reports of a forward pass.

    `importance_weight`: policy over the proximal policy where that was recomputed, else over the
    sampler. `behave_imp_weight`: proximal policy over sampler. `effective_sample_size/...`: sums of
    policy over sampler and of its square, from which `metric_row` makes the fraction.
    `mismatch` = |l - b| and `mismatch/k3`: how far the trainer and the engine differ on tokens of
    the version being trained (`same_version_T`), where they should agree.
    """
    policy_T = terms.logprobs_T.detach()
    log_ratios_T = terms.difference(policy_T, terms.behavior_logprobs_T)
    ratios_T = log_ratios_T.exp()
    sums = {"importance_weight": ratios_T, "entropy": terms.entropy_T}
    if terms.proximal_logprobs_T is not None:
        proximal_T = terms.proximal_logprobs_T
        sums["importance_weight"] = terms.difference(policy_T, proximal_T).exp_()
        behave_T = terms.difference(proximal_T, terms.behavior_logprobs_T).exp_()
        sums["behave_imp_weight"] = behave_T
    if terms.reference_logprobs_T is not None:
        gap_T = terms.difference(terms.reference_logprobs_T, policy_T)
        sums["kl/reference"] = gap_T.expm1().sub_(gap_T)
    sums["effective_sample_size/weight"] = ratios_T
    # In float64: the square of exp(MAX_LOG_RATIO) overflows float32.
    sums["effective_sample_size/square"] = ratios_T.double().square()
    engine = {
        "mismatch": log_ratios_T.abs(),
        "mismatch/k3": log_ratios_T.expm1().sub_(log_ratios_T),
    }
    return metric_sums(sums, terms.mask_T) | metric_sums(engine, terms.mask_T & same_version_T)


class ClipRange(NamedTuple):
    """Bounds of a ratio."""

    low: float
    high: float


def clip_range(config: "AlgorithmSection") -> ClipRange:
    """Return 1 - clip_low and 1 + clip_high; `config` comes from `resolved`."""
    assert config.clip_low is not None, "the Algorithm record needs clip_low"
    assert config.clip_high is not None, "the Algorithm record needs clip_high"
    return ClipRange(1 - config.clip_low, 1 + config.clip_high)


def log_ratios(terms: Terms, config: "AlgorithmSection") -> "Tensor":
    """Return [T], nats: log of policy over sampler, or over the proximal policy if configured.

    Differentiable, and always small enough for exp() in float32.
    """
    return terms.difference(terms.logprobs_T, _compared_with(terms, config))


def ratios(terms: Terms, config: "AlgorithmSection") -> "Tensor":
    """Return [T] exp() of `log_ratios`, without a gradient, in a new tensor."""
    against_T = _compared_with(terms, config)
    return terms.difference(terms.logprobs_T.detach(), against_T).exp_()


def _compared_with(terms: Terms, config: "AlgorithmSection") -> "Tensor":
    if config.use_decoupled_loss or config.ppo_clip_ref_logprobs == "batch":
        return proximal_logprobs(terms, config)
    return terms.behavior_logprobs_T


def proximal_logprobs(terms: Terms, config: "AlgorithmSection") -> "Tensor":
    """Return [T], nats: recomputed by the trainer, or the sampler's without `recompute_logprob`."""
    if not config.recompute_logprob:
        return terms.behavior_logprobs_T
    assert terms.proximal_logprobs_T is not None, "the batch lacks recomputed log-probs"
    return terms.proximal_logprobs_T


def sequence_mean(values_T: "Tensor", terms: Terms) -> "Tensor":
    """Return [T] the mean of `values_T` over the trained tokens of the token's sample.

    A sample is never split over batches. Each chain of a rollout is a separate sample.
    """
    ids_T, kept_T = terms.sequence_ids_T, terms.mask_T.to(values_T.dtype)
    # At most as many samples as tokens. How many exactly, a GPU would have to be waited for.
    sums_N = values_T.new_zeros(len(ids_T)).index_add(0, ids_T, values_T * kept_T)
    counts_N = kept_T.new_zeros(len(ids_T)).index_add(0, ids_T, kept_T)
    return (sums_N / counts_N.clamp(min=1.0)).index_select(0, ids_T)
