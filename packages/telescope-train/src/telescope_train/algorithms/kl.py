"""The KL divergence from a reference policy, estimated from the sampled tokens.

With d = l - f, policy minus reference, in nats, per token:
    k1    d
    k2    d^2 / 2
    k3    exp(-d) - 1 + d
Averaged over the policy's own samples, k1 and k3 equal the KL divergence. In a loss only the
gradient counts. On average the gradient of k2 is that of KL(policy, reference), the gradient of k3
is that of KL(reference, policy), and the gradient of k1 is 0. In a reward the value multiplies the
gradient of the log-prob, and only k1 gives that of KL(policy, reference).
"""

from typing import TYPE_CHECKING, Literal, TypeAlias

from telescope_core.base.errors import unknown_name
from telescope_train.algorithms.terms import MAX_LOG_RATIO, Terms, all_true

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def estimator_of(section: "AlgorithmSection") -> Estimator:
    """Return the estimator in the settings; by default one whose gradient is that of the KL."""
    return section.kl_estimator or ("k1" if section.kl_in_reward else "k2")


def kl_estimate(difference_T: "Tensor", estimator: Estimator) -> "Tensor":
    """Return the estimate of each token from `difference_T` = policy minus reference, nats."""
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    if estimator == "k3":
        return (-difference_T).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference_T
    raise unknown_name("kl_estimator", estimator, ("k1", "k2", "k3"))


def reference_kl(terms: Terms, estimator: Estimator) -> "Tensor":
    """Return [T], nats: the estimate against the reference model, differentiable."""
    assert terms.reference_logprobs_T is not None, "the batch lacks the reference's log-probs"
    difference_T = terms.logprobs_T - terms.reference_logprobs_T
    # The columns of a batch hold 0 for a token that is not trained on: no difference to learn from.
    if not all_true(terms.mask_T):
        difference_T = difference_T.masked_fill(~terms.mask_T, 0.0)
    return kl_estimate(difference_T, estimator)
