"""DPPO: a trust region by the divergence from the sampler, instead of by the ratio of a token.

Paper: arXiv:2602.04879, eq. 13 (tv) and 14 (kl); section 5.4 (the cut of the ratio).
    A_i as GRPO; loss: -sg(M min(u, clip_ratio_c)) A log pi
    M = 0 where (pi - mu) A > 0 and D > dppo_threshold, else 1
    tv  D = |pi - mu|
    kl  D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
with u the ratio to the old log-probs, pi and mu the probabilities of the token under the policy and
the sampler: D is between the token and all others. The trust region is always around the sampler.
Deviations: one threshold for both signs of A. u is cut at 5, not 20, because with 20 one token of
200 could have a tenth of the gradient. In `kl`, the others have a probability of at least 1e-8.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, above, ratios

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection

THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Divergence -> the default of `dppo_threshold`: what the paper recommends."""
LEAST_REST = 1e-8
"""Smallest probability of all other tokens together: a log-prob of 0 is a rounded one."""


def divergence(terms: Terms, config: "AlgorithmSection") -> "Tensor":
    """Return [T], 0 or more: how far the policy is from the sampler at each token."""
    policy_T, sampler_T = terms.logprobs_T.detach(), terms.behavior_logprobs_T
    probs_T = sampler_T.exp()
    if config.dppo_divergence == "tv":
        return probs_T.sub_(policy_T.exp()).abs_()
    # 1 - exp(l) without the cancellation, which leaves nothing of it where l is near 0.
    rest_T = sampler_T.expm1().neg_().clamp_(min=LEAST_REST)
    policy_rest_T = policy_T.expm1().neg_().clamp_(min=LEAST_REST)
    others_T = (rest_T / policy_rest_T).log_().mul_(rest_T)
    return others_T.add_(probs_T.mul_(sampler_T - policy_T))


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the weighted policy gradient of each token, without those that leave the region."""
    assert config.clip_ratio_c is not None, "the Algorithm record needs clip_ratio_c"
    threshold = config.dppo_threshold or THRESHOLDS[config.dppo_divergence]
    ratios_T, advantages_T = ratios(terms, config), terms.advantages_T
    outward_T = (terms.logprobs_T.detach() - terms.behavior_logprobs_T).mul_(advantages_T)
    is_out_T = above(divergence(terms, config), threshold).mul_(above(outward_T, 0.0))
    is_high_T = is_out_T * above(advantages_T, 0.0)
    kept_T = 1 - is_out_T
    metrics = {
        "clip_fraction/low": is_out_T.sub_(is_high_T),
        "clip_fraction/high": is_high_T,
        "clip_fraction/dual": above(ratios_T, config.clip_ratio_c).mul_(kept_T),
    }
    weights_T = ratios_T.clamp_(max=config.clip_ratio_c).mul_(kept_T).mul_(advantages_T).neg_()
    return TokenLoss(loss_T=weights_T * terms.logprobs_T, metrics=metrics)


ALGORITHM = Algorithm(
    name="dppo",
    paper="arXiv:2602.04879",
    advantage=normalized,
    loss=loss,
    weighting="token",
    compares="group",
    has_ratio=True,
    clip_ratio_c=5.0,
    reads=frozenset({"advantage_norm", "dppo_divergence", "dppo_threshold"}),
)
