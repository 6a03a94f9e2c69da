"""The policy gradient, plain or with the clip of PPO: the loss of most algorithms.

Paper: arXiv:1707.06347, eq. 7 (clip); arXiv:1912.09729, eq. 5 (dual clip). With u the ratio to the
old log-probs and A the advantage, per token:
    plain           -A log pi
    use_ppo_clip    -min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
    clip_ratio_c    where A < 0, at most -c A
"""

import math
from typing import TYPE_CHECKING

from telescope_train.algorithms.terms import (
    MAX_LOG_RATIO,
    Terms,
    TokenLoss,
    above,
    clip_range,
    ratios,
)

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


WITHIN = 0.999 * math.exp(MAX_LOG_RATIO)
"""Ratios above it were cut off by `ratios`, so they no longer follow the policy.

The factor leaves room for the rounding of exp() in float32."""
DUAL_CLIP = 3.0
"""The default of `clip_ratio_c`: what arXiv:1912.09729 uses.

For a negative advantage, PPO's own bound only limits ratios that are too low. Without this one, a
single token of 200 that became e^10 times as probable would get all of the gradient."""


def policy_gradient(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return -A log pi of each token, or the clipped surrogate where `use_ppo_clip` is set."""
    if not config.use_ppo_clip:
        return TokenLoss(loss_T=-terms.advantages_T * terms.logprobs_T)
    return dual_clipped(clipped_surrogate(ratios(terms, config), terms, config), terms, config)


def clipped_surrogate(ratios_T: "Tensor", terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the surrogate of `ratios_T`: the low bound acts where A < 0, the high where A > 0.

    `ratios_T` carries no gradient and is overwritten. The derivative of a ratio with respect to the
    log-prob is the ratio itself, so the slope of the loss equals the loss, but it is 0 for tokens
    that a bound holds.
    """
    import torch

    advantages_T = terms.advantages_T
    gain_T = advantages_T * ratios_T
    loss_T = torch.minimum(gain_T, ratios_T.clamp(*clip_range(config)).mul_(advantages_T))
    # A bound holds a token where the minimum is not the gain. Floats of 0 and 1, because bools and
    # where() cost several times as much on a CPU.
    is_held_T = gain_T.ne_(loss_T)
    loss_T = loss_T.neg_()
    slope_T = torch.addcmul(loss_T, loss_T, is_held_T, value=-1)
    slope_T = slope_T.mul_(ratios_T.le_(WITHIN))
    is_high_T = is_held_T * above(advantages_T, 0.0)
    fractions = {"clip_fraction/low": is_held_T.sub_(is_high_T), "clip_fraction/high": is_high_T}
    return TokenLoss(loss_T=with_slope(loss_T, slope_T, terms), metrics=fractions)


def with_slope(values_T: "Tensor", slopes_T: "Tensor", terms: Terms) -> "Tensor":
    """Return `values_T` as a function of `logprobs_T` with the derivative `slopes_T`.

    This is for formulas with a known derivative: computing them in place and without autograd takes
    a fraction of autograd's time and memory.
    """
    import torch

    # 0 in value and 1 in derivative: adds the slopes to the gradient and nothing to the values.
    zeros_T = terms.logprobs_T - terms.logprobs_T.detach()
    return torch.addcmul(values_T, slopes_T, zeros_T)


def dual_clipped(clipped: TokenLoss, terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return `clipped` with the loss of tokens with A < 0 held at -clip_ratio_c * A, if it is set.

    The bounds of PPO leave such a token's ratio open upwards, so one of them could have all of the
    gradient.
    """
    if config.clip_ratio_c is None:
        return clipped
    ceiling_T = -config.clip_ratio_c * terms.advantages_T
    is_cut_T = (terms.advantages_T < 0) & (clipped.loss_T > ceiling_T)
    return TokenLoss(
        loss_T=ceiling_T.where(is_cut_T, clipped.loss_T),
        metrics={**clipped.metrics, "clip_fraction/dual": is_cut_T},
    )


def negative_log_likelihood(terms: Terms) -> TokenLoss:
    """Return the supervised loss: -log p of each trained token, and the mean over them as `nll`."""
    loss_T = (-terms.logprobs_T).where(terms.mask_T, 0.0)
    return TokenLoss(loss_T=loss_T, metrics={"nll": loss_T})
