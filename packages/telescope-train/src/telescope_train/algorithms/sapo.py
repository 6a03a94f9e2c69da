"""SAPO: a smooth gate instead of a clip; tokens far from the old policy fade out.

Paper: arXiv:2511.20347, section 3.
    A_i as GRPO; loss: -(4 / tau) sigmoid(tau (u - 1)) A
with u the ratio to the old log-probs, tau = sapo_tau_pos where A > 0, else sapo_tau_neg. The gate
has slope 1 at u = 1, so the on-policy gradient is the plain one. Each sequence weighs the same.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.advantages import normalised
from telescope_train.algorithms.ratios import log_ratios
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the gated surrogate of each token."""
    ratios_T, advantages_T = log_ratios(terms, config).exp(), terms.advantages_T
    positive_T = advantages_T.new_full((), config.sapo_tau_pos)
    tau_T = positive_T.where(advantages_T > 0, config.sapo_tau_neg)
    gate_T = (tau_T * (ratios_T - 1)).sigmoid() * (4 / tau_T)
    return TokenLoss(loss_T=-gate_T * advantages_T)


ALGORITHM = Algorithm(
    name="sapo",
    paper="arXiv:2511.20347",
    advantage=normalised,
    loss=loss,
    weighting="sequence",
    has_ratio=True,
    reads=frozenset({"advantage_norm", "sapo_tau_pos", "sapo_tau_neg"}),
)
