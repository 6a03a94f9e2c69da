"""CISPO: the clipped ratio is only a weight, so clipping removes no token's gradient.

Paper: arXiv:2506.13585, eq. 4 and 5.
    A_i as GRPO; loss: -sg(clip(u, 1 - clip_low, 1 + clip_high)) A log pi
with u the ratio to the old log-probs. clip_low = 1 leaves the lower side open, as in the paper.
Deviations: the paper gives no number for clip_high; 4 makes the largest weight 5. There is no dual
clip, because it would cut the gradient of unlikely tokens, which this loss is meant to keep.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, above, below, clip_range, ratios

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the weighted policy gradient of each token and how many weights were clipped."""
    ratios_T = ratios(terms, config)
    low, high = clip_range(config)
    clipped = {
        "clip_fraction/low": below(ratios_T, low),
        "clip_fraction/high": above(ratios_T, high),
    }
    weights_T = ratios_T.clamp_(low, high).mul_(terms.advantages_T).neg_()
    return TokenLoss(loss_T=weights_T * terms.logprobs_T, metrics=clipped)


ALGORITHM = Algorithm(
    name="cispo",
    paper="arXiv:2506.13585",
    advantage=normalized,
    loss=loss,
    weighting="token",
    compares="group",
    has_ratio=True,
    clip_low=1.0,
    clip_high=4.0,
    reads=frozenset({"advantage_norm"}),
)
