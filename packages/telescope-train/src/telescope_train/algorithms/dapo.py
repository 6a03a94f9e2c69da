"""DAPO: GRPO with a higher upper clip, token weighting and only groups that carry signal.

Paper: arXiv:2503.14476, eq. 8 (loss), 10 (clip-higher), 12 (token weighting), 13 (overlong).
    A_i as GRPO; loss: the policy gradient, clipped to [1 - 0.2, 1 + 0.28] by default
This is a preset. Dynamic sampling is should_accept_fn = "has_signal": without it, groups of equal
rewards are left out and not replaced. The soft length penalty is overlong_penalty_factor with
overlong_buffer_tokens, which you set to fit your task.
Deviations: tokens weigh the same over the whole step, not in each group; there is a dual clip
(clip_ratio_c, 3 by default).
"""

from telescope_train.algorithms.advantages import normalized
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm

ALGORITHM = Algorithm(
    name="dapo",
    paper="arXiv:2503.14476",
    advantage=normalized,
    loss=policy_gradient,
    weighting="token",
    compares="group",
    use_ppo_clip=True,
    clip_low=0.2,
    clip_high=0.28,
    reads=frozenset({"advantage_norm"}),
)
