"""The policy gradient, plain or with the clip of PPO: the loss of most algorithms.

Paper: arXiv:1707.06347, eq. 7 (clip); arXiv:1912.09729, eq. 5 (dual clip). With u the ratio to the
old log-probs and A the advantage, per token:
    plain           -A log pi
    use_ppo_clip    -min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
    clip_ratio_c    where A < 0, at most -c A
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.ratios import clip_range, log_ratios
from telescope_train.algorithms.terms import Terms, TokenLoss, metric_sums

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


def policy_gradient(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return -A log pi of each token, or the clipped surrogate where `use_ppo_clip` is set."""
    if not config.use_ppo_clip:
        return TokenLoss(loss_T=-terms.advantages_T * terms.logprobs_T)
    clipped = clipped_surrogate(log_ratios(terms, config).exp(), terms, config)
    return clipped if config.clip_ratio_c is None else _dual_clip(clipped, terms, config)


def clipped_surrogate(ratios_T: "Tensor", terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the surrogate of `ratios_T`: the low side binds where A < 0, the high where A > 0."""
    low, high = clip_range(config)
    advantages_T = terms.advantages_T
    is_low_T = (ratios_T < low) & (advantages_T < 0)
    is_high_T = (ratios_T > high) & (advantages_T > 0)
    # The same as the minimum of the two products, whose gradient costs several times as much.
    is_free_T = ~(is_low_T | is_high_T)
    bounded_T = ratios_T.where(is_free_T, ratios_T.detach().clamp(low, high))
    fractions = {"clip_fraction/low": is_low_T, "clip_fraction/high": is_high_T}
    return TokenLoss(loss_T=-advantages_T * bounded_T, metrics=metric_sums(fractions, terms.mask_T))


def _dual_clip(clipped: TokenLoss, terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    assert config.clip_ratio_c is not None
    ceiling_T = -config.clip_ratio_c * terms.advantages_T
    is_cut_T = (terms.advantages_T < 0) & (clipped.loss_T > ceiling_T)
    fraction = metric_sums({"clip_fraction/dual": is_cut_T}, terms.mask_T)
    return TokenLoss(
        loss_T=ceiling_T.where(is_cut_T, clipped.loss_T), metrics={**clipped.metrics, **fraction}
    )
