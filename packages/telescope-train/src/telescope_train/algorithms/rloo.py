"""RLOO: each rollout compared with the mean of the others in its group; no normalization.

Paper: arXiv:2402.14740, section 3.3 (REINFORCE with a leave-one-out baseline).
    A_i = r_i - mean of the other G - 1 rewards; loss: the policy gradient, plain or clipped
Unbiased, because the baseline does not depend on the rollout it is subtracted from.
Deviations: gradients of tokens are summed over rollouts and divided by the step's tokens, which is
the paper's gradient times one number per step; its KL in the reward is a setting.
"""

from telescope_train.algorithms.advantages import leave_one_out, without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="rloo",
    paper="arXiv:2402.14740",
    advantage=without_norm(leave_one_out),
    loss=policy_gradient,
    weighting="token",
    compares="group",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
)
