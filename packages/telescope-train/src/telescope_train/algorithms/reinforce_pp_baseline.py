"""REINFORCE++ with a group baseline: centered in the group, whitened over the batch.

Paper: arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    A_i = (r_i - mean_g) / (std of r - mean_g over the batch + 1e-4); loss: the policy gradient
Dividing by the deviation of the whole batch does not blow up groups whose rewards hardly differ.
Deviations: the clip is a setting and off by default, and so is the KL in the loss (the paper's is
kl_estimator = "k2"); whitening is over rollouts, not over tokens.
"""

from functools import partial

from telescope_train.algorithms.advantages import normalized, without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="reinforce_pp_baseline",
    paper="arXiv:2501.03262",
    advantage=without_norm(partial(normalized, norm="batch")),
    loss=policy_gradient,
    weighting="token",
    compares="batch",
    fixed_norm="batch",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
)
