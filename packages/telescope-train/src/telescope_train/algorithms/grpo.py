"""GRPO: rewards compared within the group of rollouts of one example; no value model.

Paper: arXiv:2402.03300, eq. 3 and section 4.1.2 (advantages from outcome rewards).
    A_i = (r_i - mean_g) / (std_g + 1e-4); loss: the policy gradient, plain or clipped
Deviations: tokens weigh the same over the whole step, not 1 / |o_i| per rollout; the clip and the
KL term are settings and off by default (the paper's is kl_estimator = "k3"); the deviation has
ddof 1 and 1e-4 added.
"""

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="grpo",
    paper="arXiv:2402.03300",
    advantage=normalized,
    loss=policy_gradient,
    weighting="token",
    compares="group",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
    reads=frozenset({"advantage_norm"}),
)
