"""MaxRL: the gradient of the log of the success rate; hard examples count more.

Paper: arXiv:2602.02710, section 4 (estimator over successful rollouts, less the mean score).
    A_i = (r_i - mean_g) / mean_g, 0 where no rollout succeeded; loss: the policy gradient
For rewards of 0 or 1 with K successes of G: (1 / K) sum of the successes' scores, less the mean
of all scores. With G rollouts it is on average the gradient of maximum likelihood to order G - 1:
groups without a success keep no mean score, or it would be G.
Deviations: any reward of at least 0 is taken; tokens are divided by the step's tokens, which is
the paper's gradient times one number per step.
"""

from telescope_train.algorithms.advantages import relative_to_mean, without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="maxrl",
    paper="arXiv:2602.02710",
    advantage=without_norm(relative_to_mean),
    loss=policy_gradient,
    weighting="token",
    compares="group",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
    takes_negative_rewards=False,
)
