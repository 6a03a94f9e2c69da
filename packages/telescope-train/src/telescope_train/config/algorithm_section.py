"""The settings of `[algorithm]`: how rewards become a loss."""

from typing import Annotated, Literal

from pydantic import Field

from telescope_train.config.fields import Count, Index, NotNegative, Positive, Ratio, Section


class AlgorithmSection(Section):
    """The settings by which rewards become a loss."""

    algorithm: Annotated[str, Field(min_length=1)] = "grpo"
    """Name of an installed algorithm, or `module:NAME`."""
    advantage_norm: Literal["group", "batch", "parts"] = "group"
    """Divide advantages, rewards minus their group's mean, by their standard deviation within the
    group, or over the batch; `parts` = normalize each part of a reward within the group, add them
    by their weights, and divide the sum by its deviation over the batch (GDPO)."""
    pass_at_k: Count = 1
    """Train for the best of this many answers: a reward becomes the mean of the largest one of each
    k rollouts of the group that it is among; 1 = each answer counts by itself. Needs larger groups
    and advantages that are not divided by the group's deviation."""
    branch_credit: Literal["outcome", "shared", "per_agent"] = "outcome"
    """Credit of the branches of a rollout with compaction or sub-agents: `outcome` = the rollout's
    advantage for each of their tokens, `shared` = an equal share of it for each branch, `per_agent`
    = each agent, told by its system message, is compared with itself in the rest of the group."""
    use_ppo_clip: bool | None = None
    """Clip the ratio of new to old probability as PPO does; null = the algorithm's own."""
    clip_low: Ratio | None = None
    """Lower clip distance; null = the algorithm's own."""
    clip_high: NotNegative | None = None
    """Upper clip distance; null = the algorithm's own."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: the loss of a token with a negative advantage A is at most this times -A; null = 3
    with `use_ppo_clip`, GSPO and GMPO; in DPPO the largest weight of any token, 5. A large number
    turns it off: a single token may then outweigh all others."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """Divergence of policy and sampler at a token, with `dppo`: `tv` = the difference of its two
    probabilities, `kl` = the KL divergence between it and all others, sampler first."""
    dppo_threshold: Positive | None = None
    """A token with a larger divergence is left out where its update would push it further away,
    with `dppo`; null = 0.15 with `tv`, 0.05 with `kl`. With `tv` it must be below 1."""
    ppo_clip_ref_logprobs: Literal["rollout", "batch"] = "rollout"
    """Old log-probs of the ratio: the sampler's, or recomputed by the trainer for each batch."""
    use_tis: bool | None = None
    """Weight tokens by the truncated ratio of trainer to sampler probability; null = only if
    rollouts can be older than the weights, in later minibatches and epochs too, and no ratio in the
    loss corrects for it."""
    tis_cap: Positive = 2.0
    """Largest weight of a token, with `use_tis`."""
    tis_mode: Literal["truncate", "icepop"] = "truncate"
    """Treatment of weights above `tis_cap`: `truncate` = they are cut to it, `icepop` = they become
    0, as do weights below `tis_floor`."""
    tis_floor: NotNegative = 0.0
    """Weights below this become 0, with `tis_mode` icepop; 0 = none, so only high ones do."""
    seq_is_masking: bool = False
    """Leave out samples whose geometric mean ratio of trainer to sampler is out of bounds."""
    seq_is_mask_range: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]] = (
        0.8,
        1.2,
    )
    """Lower and upper bound of that ratio, with `seq_is_masking`."""
    use_decoupled_loss: bool = False
    """Use the ratio to recomputed log-probs, and weight tokens by the ratio of recomputed to
    sampler probability."""
    recompute_logprob: bool = True
    """Recompute log-probs before the first step of a batch if the loss needs them; false = use the
    sampler's instead, which `use_decoupled_loss` does not allow."""
    behave_imp_weight_cap: Positive = 5.0
    """Tokens with a larger weight are left out, with `use_decoupled_loss`."""
    kl_penalty_tau: NotNegative = 0.0
    """Weight of the KL divergence from the reference model; 0 = none."""
    reference_model: Annotated[str, Field(min_length=1)] | None = None
    """Folder or Hub id of another model to be the reference, such as the teacher of `opd`; null =
    the model of the run as it began. Token ids must mean the same to both."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL divergence, with `kl_penalty_tau`; null = the one whose gradient is that
    of the divergence: `k2` in the loss, `k1` in the reward."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    number_of_minibatches: Count = 1
    """Optimizer steps into which one batch is divided, each with whole groups."""
    ppo_epochs: Count = 1
    """Number of times that the trainer goes through one batch."""
    filter_overlong: bool = False
    """Do not train on rollouts that were cut by `max_tokens` or by the length of the context; they
    stay in the group's baseline."""
    filter_timeout: bool = True
    """Do not train on rollouts that reached `rollout_timeout_s`, or the `agent_timeout_s` of their
    program; they are scored as they stand, and stay in the group's baseline."""
    overlong_penalty_factor: NotNegative = 0.0
    """Subtracted from the reward of a rollout that fills `max_tokens`; less is subtracted from one
    that comes close."""
    overlong_buffer_tokens: Count = 256
    """Tokens before `max_tokens` over which the penalty grows, with `overlong_penalty_factor`."""
    filter_gibberish: bool = False
    """Do not train on rollouts in which a rare token was sampled whose log-prob is more than 2 nats
    below that of a uniform draw from the vocabulary."""
    gibberish_token_threshold: Count = 100_000
    """Token ids above this are rare, with `filter_gibberish`."""
    filter_repetition: bool = False
    """Do not train on rollouts whose text repeats itself."""
    repetition_compression_threshold: Annotated[float, Field(gt=1)] = 10.0
    """A text repeats itself if zlib makes it this many times smaller, with `filter_repetition`."""

    kl_in_reward: bool = False
    """Subtract the KL divergence from the reward instead of adding it to the loss."""
    reference_update_every: Index = 0
    """Steps after which the reference model takes over the trained weights; 0 = it stays frozen."""

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_penalty_tau > 0 and not self.kl_in_reward

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads log-probs that the trainer recomputes for each batch."""
        is_read = self.ppo_clip_ref_logprobs == "batch" or self.use_decoupled_loss
        return is_read and self.recompute_logprob

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is kept."""
        return self.kl_penalty_tau > 0 or self.reference_model is not None
