"""OPD: on-policy distillation, the policy gradient of the divergence from a teacher.

Paper: arXiv:2306.13649 (GKD on the student's own answers, with the reverse KL).
    A_t = f - sg(l), cut to +-10; loss: the policy gradient, plain or clipped, with A_t as advantage
with l the policy and f the teacher, `reference_model`, at a token that the policy sampled: its
gradient is that of KL(policy, teacher) at each token, on average. Rewards are recorded and not
used, so one rollout of an example is enough.
Deviations: a token answers for itself alone, not for the divergence of the tokens after it. The
divergence is estimated from the sampled token, not summed over the vocabulary. The cut, which is
ours, keeps one token that the teacher would never write from outweighing all others.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from telescope_train.algorithms.advantages import without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


MAX_GAP = 10.0
"""Nats; most that the log-probs of teacher and policy count as apart at a token."""


def loss(terms: Terms, config: "AlgorithmSection") -> TokenLoss:
    """Return the policy gradient of each token, toward the teacher's probability of it."""
    assert terms.reference_logprobs_T is not None, "the batch lacks the teacher's log-probs"
    gaps_T = (terms.reference_logprobs_T - terms.logprobs_T.detach()).clamp_(-MAX_GAP, MAX_GAP)
    # The rollout's advantage is 1: every one of them teaches.
    return policy_gradient(replace(terms, advantages_T=gaps_T.mul_(terms.advantages_T)), config)


ALGORITHM = Algorithm(
    name="opd",
    paper="arXiv:2306.13649",
    advantage=without_norm(lambda rewards_N, groups_N: np.ones_like(rewards_N)),
    loss=loss,
    weighting="token",
    compares="group",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
    min_group_size=1,
    needs_reference=True,
)
