"""GRPO: rewards compared within the group of rollouts of one example; no value model.

Paper: arXiv:2402.03300, eq. 3 and section 4.1.2 (advantages from outcome rewards).
With pi the policy, b the sampler, u = pi / b and A the advantage of the rollout, per token:
    plain            -A log pi                       (gradient of eq. 3 where u = 1)
    use_tis          -sg(min(u, tis_cap)) A log pi
    use_ppo_clip     -min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
Deviations: tokens weigh the same over the whole step, not 1 / |o_i| per rollout; no KL term; the
deviation has ddof 1 and 1e-4 added; the default is the plain form, not the clipped one.
"""

import torch

from telescope_core.errors import ConfigError
from telescope_train.algorithms.advantages import normalised
from telescope_train.algorithms.record import Algorithm, LossSettings
from telescope_train.algorithms.terms import Terms, TokenLoss, metric_sums


def loss(terms: Terms, config: LossSettings) -> TokenLoss:
    """Return the loss of each token and the fractions that were clipped or cut."""
    if config.use_ppo_clip and config.use_tis:
        raise ConfigError(
            "use_ppo_clip and use_tis both correct for the ratio to the sampler: turn one off"
        )
    if config.use_ppo_clip:
        return _clipped(terms, config)
    zeros_T = torch.zeros_like(terms.logprobs_T)
    loss_T = torch.where(terms.mask_T, -terms.advantages_T * terms.logprobs_T, zeros_T)
    if not config.use_tis:
        return TokenLoss(loss_T=loss_T)
    ratios_T = terms.log_ratios_T.detach().exp()
    capped = metric_sums({"tis/capped_fraction": ratios_T > config.tis_cap}, terms.mask_T)
    return TokenLoss(loss_T=ratios_T.clamp(max=config.tis_cap) * loss_T, metrics=capped)


def _clipped(terms: Terms, config: LossSettings) -> TokenLoss:
    """The surrogate of PPO; the low side binds where A < 0, the high side where A > 0."""
    low = 1 - (ALGORITHM.clip_low if config.clip_low is None else config.clip_low)
    high = 1 + (ALGORITHM.clip_high if config.clip_high is None else config.clip_high)
    ratios_T = terms.log_ratios_T.exp()
    advantages_T = torch.where(terms.mask_T, terms.advantages_T, torch.zeros_like(ratios_T))
    surrogate_T = torch.minimum(ratios_T * advantages_T, ratios_T.clamp(low, high) * advantages_T)
    clipped = {
        "clip_fraction/low": (ratios_T < low) & (advantages_T < 0),
        "clip_fraction/high": (ratios_T > high) & (advantages_T > 0),
    }
    return TokenLoss(loss_T=-surrogate_T, metrics=metric_sums(clipped, terms.mask_T))


ALGORITHM = Algorithm(
    name="grpo",
    paper="arXiv:2402.03300",
    advantage=normalised,
    loss=loss,
    weighting="token",
    clip_low=0.2,
    clip_high=0.2,
    min_group_size=2,
)
