"""Ratios of the policy's probabilities to reference probabilities, per token and sequence."""

from typing import TYPE_CHECKING, NamedTuple

from telescope_train.algorithms.terms import Terms

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


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
