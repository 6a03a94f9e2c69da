"""The settings of `[algorithm]`: how rewards become a loss."""

from typing import Literal

from telescope_train.config.fields import NotNegative, Positive, Ratio, Section


class AlgorithmSection(Section):
    """How rewards become a loss."""

    algorithm: str = "grpo"
    """Name of an installed algorithm."""
    advantage_norm: Literal["group", "batch"] = "group"
    """Divide advantages by the standard deviation within the group, or over the batch."""
    use_ppo_clip: bool = False
    """Clip the ratio of new to old probability as PPO does."""
    clip_low: Ratio | None = None
    """Lower clip distance, with `use_ppo_clip`; null = the algorithm's own."""
    clip_high: NotNegative | None = None
    """Upper clip distance, with `use_ppo_clip`; null = the algorithm's own."""
    use_tis: bool = False
    """Weight tokens by the truncated ratio of trainer to sampler probability."""
    tis_cap: Positive = 2.0
    """Largest such weight, with `use_tis`."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything compares the policy with a reference model; no loss here does."""
        return False
