"""GSPO: one ratio per sequence, its geometric mean over tokens, clipped as a whole.

Paper: arXiv:2507.18071, eq. 5 and 7; written per token as eq. 13 and 14.
    s = exp(mean_t (l - ref)); s_t = sg(s) exp(l - sg(l))
    A_i as GRPO; loss: -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)
Each sequence weighs 1 / N, each of its tokens 1 / (N |y|): the only division by length.
Deviations: a rollout whose history was rewritten is several samples; each has a ratio of its own.
A dual clip (clip_ratio_c, 3 by default) holds s where A < 0: a sequence with s = 20 would have most
of the gradient. A large value turns it off.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.policy_gradient import DUAL_CLIP, clipped_surrogate, dual_clipped
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, log_ratios, sequence_mean

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the clipped surrogate of each token; all tokens of a sequence share one ratio."""
    mean_T = sequence_mean(log_ratios(terms, config).detach(), terms)
    # The slope -s A that clipped_surrogate gives each token is the derivative of -s_t A.
    return dual_clipped(clipped_surrogate(mean_T.exp(), terms, config), terms, config)


ALGORITHM = Algorithm(
    name="gspo",
    paper="arXiv:2507.18071",
    advantage=normalized,
    loss=loss,
    weighting="sequence",
    compares="group",
    has_ratio=True,
    clip_low=3e-4,
    clip_high=4e-4,
    clip_ratio_c=DUAL_CLIP,
    reads=frozenset({"advantage_norm"}),
)
