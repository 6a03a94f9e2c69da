"""The settings of `[algorithm]`: how rewards become a loss."""

from typing import Annotated, Literal

from pydantic import Field

from telescope_train.config.fields import Count, NotNegative, Positive, Ratio, Section


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
    number_of_minibatches: Count = 1
    """Optimiser steps that one batch is dealt into, whole groups each."""
    ppo_epochs: Count = 1
    """How often the trainer goes through one batch."""
    filter_overlong: bool = False
    """Do not train on rollouts that were cut by `max_tokens`; they stay in the group's baseline."""
    overlong_penalty_factor: NotNegative = 0.0
    """Taken off the reward of a rollout that fills `max_tokens`; less for one that comes close."""
    overlong_buffer_tokens: Count = 256
    """Tokens before `max_tokens` over which the penalty grows, with `overlong_penalty_factor`."""
    filter_gibberish: bool = False
    """Do not train on rollouts in which a rare and nearly impossible token was sampled."""
    gibberish_token_threshold: Count = 100_000
    """Token ids above it are rare, with `filter_gibberish`."""
    gibberish_logprob_offset: Positive = 2.0
    """Nats below a uniform draw at which a token is nearly impossible, with `filter_gibberish`."""
    filter_repetition: bool = False
    """Do not train on rollouts whose text repeats itself."""
    repetition_compression_threshold: Annotated[float, Field(gt=1)] = 10.0
    """How many times smaller zlib makes such a text, with `filter_repetition`."""

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads log-probs recomputed for each batch; no loss here does."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether anything compares the policy with a reference model; no loss here does."""
        return False
