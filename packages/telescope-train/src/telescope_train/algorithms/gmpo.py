"""GMPO: one ratio per sequence, the geometric mean over tokens whose ratios are each clipped.

Paper: arXiv:2507.20673 (the geometric mean, and its clip of each token).
    c_t = min(log u_t, log(1 + clip_high)) where A > 0, max(log u_t, log(1 - clip_low)) where A < 0
    s = exp(mean_t c_t); A_i as GRPO; loss: -s A
with u the ratio to the old log-probs. A token that its bound holds has no gradient; the others of
the sequence keep theirs, which is what tells GMPO from GSPO. Each sequence weighs 1 / N, each of
its tokens 1 / (N |y|).
Deviations: as in GSPO, each chain of a rewritten rollout has a ratio of its own, and a dual clip
(clip_ratio_c) holds s where A < 0. The bounds are exp(-0.4) and exp(0.4) to two digits.
"""

import math
from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.policy_gradient import DUAL_CLIP, dual_clipped, with_slope
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import (
    Terms,
    TokenLoss,
    above,
    below,
    clip_range,
    log_ratios,
    sequence_mean,
)

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the surrogate of each token; all tokens of a sequence share one ratio."""
    low, high = (math.log(bound) for bound in clip_range(config))
    advantages_T, logs_T = terms.advantages_T, log_ratios(terms, config).detach()
    is_high_T = above(logs_T, high).mul_(above(advantages_T, 0.0))
    is_low_T = below(logs_T, low).mul_(below(advantages_T, 0.0))
    kept_T = 1 - is_high_T - is_low_T
    held_T = (logs_T * kept_T).add_(is_high_T, alpha=high).add_(is_low_T, alpha=low)
    loss_T = sequence_mean(held_T, terms).exp_().mul_(advantages_T).neg_()
    # The derivative of s by the log-prob of a token is s / |y|; weights of tokens hold 1 / |y|.
    surrogate = TokenLoss(
        loss_T=with_slope(loss_T, loss_T * kept_T, terms),
        metrics={"clip_fraction/low": is_low_T, "clip_fraction/high": is_high_T},
    )
    return dual_clipped(surrogate, terms, config)


ALGORITHM = Algorithm(
    name="gmpo",
    paper="arXiv:2507.20673",
    advantage=normalized,
    loss=loss,
    weighting="sequence",
    compares="group",
    has_ratio=True,
    clip_low=0.33,
    clip_high=0.49,
    clip_ratio_c=DUAL_CLIP,
    reads=frozenset({"advantage_norm"}),
)
