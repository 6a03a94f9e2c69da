"""SAPO: a smooth gate instead of a clip; tokens far from the old policy fade out.

Paper: arXiv:2511.20347, section 3.
    A_i as GRPO; loss: -(4 / tau) sigmoid(tau (u - 1)) A
with u the ratio to the old log-probs, tau = 1 where A > 0, else 1.05, as in the paper. The gate
has slope 1 at u = 1, so the on-policy gradient is the plain one. Each sequence weighs the same.
A variant with other steepness: `replace(ALGORITHM, loss=partial(loss, tau_pos=2.0))`.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.policy_gradient import with_slope
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, above, ratios

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss(
    terms: Terms, config: "AlgorithmSection", *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLoss:
    """Return the gated surrogate of each token; `tau_pos` and `tau_neg`: how steep the gate is."""
    ratios_T, advantages_T = ratios(terms, config), terms.advantages_T
    tau_T = above(advantages_T, 0.0).mul_(tau_pos - tau_neg).add_(tau_neg)
    gate_T = (ratios_T - 1).mul_(tau_T).sigmoid_()
    loss_T = -4 * advantages_T * gate_T
    # The gate g has slope tau u g (1 - g) in log pi; its tau cancels with that of 4 / tau.
    slope_T = loss_T * (1 - gate_T) * ratios_T
    return TokenLoss(loss_T=with_slope(loss_T / tau_T, slope_T, terms))


ALGORITHM = Algorithm(
    name="sapo",
    paper="arXiv:2511.20347",
    advantage=normalized,
    loss=loss,
    weighting="sequence",
    compares="group",
    has_ratio=True,
    reads=frozenset({"advantage_norm"}),
)
