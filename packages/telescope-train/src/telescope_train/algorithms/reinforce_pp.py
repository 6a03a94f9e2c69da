"""REINFORCE++: rewards whitened over the whole batch; needs no groups.

Paper: arXiv:2501.03262, section 3 (advantages normalized over the global batch).
    A_i = (r_i - mean of the batch) / (std of the batch + 1e-4); loss: the policy gradient
The only algorithm here that learns from one rollout per example.
Deviations: the clip is a setting and off by default, and so is the KL in the reward (kl_in_reward);
whitening is over rollouts, not over tokens.
"""

from telescope_train.algorithms.advantages import whitened, without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="reinforce_pp",
    paper="arXiv:2501.03262",
    advantage=without_norm(lambda rewards_N, groups_N: whitened(rewards_N)),
    loss=policy_gradient,
    weighting="token",
    compares="batch",
    fixed_norm="batch",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
    min_group_size=1,
)
