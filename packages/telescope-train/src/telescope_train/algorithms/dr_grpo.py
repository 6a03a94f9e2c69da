"""Dr. GRPO: GRPO without the two divisions that bias it, by deviation and by length.

Paper: arXiv:2503.20783, section 3.2.
    A_i = r_i - mean_g; loss: the policy gradient, plain or clipped
    weight of a token: 1 / (N max_tokens), however long rollouts are
Deviation: the clip is a setting and off by default. A variant that divides by the step's tokens:
`replace(ALGORITHM, weighting="token")`.
"""

from telescope_train.algorithms.advantages import centered, without_norm
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="dr_grpo",
    paper="arXiv:2503.20783",
    advantage=without_norm(centered),
    loss=policy_gradient,
    weighting="constant",
    compares="group",
    use_ppo_clip=False,
    clip_low=0.2,
    clip_high=0.2,
)
