"""Corrections for rollouts that were sampled by weights older than those they train."""

from telescope_train.algorithms.objective import resolved
from telescope_train.algorithms.record import Algorithm, load_algorithm
from telescope_train.config.algorithm_section import AlgorithmSection
from telescope_train.config.fields import decided, was_set
from telescope_train.config.schema import TrainConfig


def has_ratio(section: AlgorithmSection, algorithm: Algorithm) -> bool:
    """Return whether the loss contains a ratio to old log-probs."""
    return algorithm.has_ratio or bool(resolved(section, algorithm).use_ppo_clip)


def algorithm_in_use(config: TrainConfig) -> AlgorithmSection:
    """Return `[algorithm]` with the values that other settings decide and nobody set.

    They are: `advantage_norm` if the algorithm has only one, the old log-probs of a decoupled loss,
    and `use_tis` if it is null. A plain policy gradient is biased on samples from older weights, or
    from weights in fewer bits, so its tokens are weighted by default. A loss that contains a ratio
    to the sampler's log-probs already corrects for both. One to log-probs of the trainer, computed
    before the first step on the batch, corrects for the steps after it alone.
    """
    section = config.algorithm
    algorithm = load_algorithm(section.algorithm)
    if algorithm.fixed_norm is not None and not was_set(section, "advantage_norm"):
        section = decided(section, advantage_norm=algorithm.fixed_norm)
    if section.use_decoupled_loss and not was_set(section, "ppo_clip_ref_logprobs"):
        section = decided(section, ppo_clip_ref_logprobs="batch")
    if section.use_tis is not None:
        return section
    num_updates = section.number_of_minibatches * section.ppo_epochs
    is_other = (
        config.scheduling.max_async_rollout > 0 or config.inference.inference_quantization != "none"
    )
    if is_other:
        return decided(section, use_tis=not has_ratio_to_sampler(section, algorithm))
    is_corrected = section.use_decoupled_loss or has_ratio(section, algorithm)
    return decided(section, use_tis=num_updates > 1 and not is_corrected)


def has_ratio_to_sampler(section: AlgorithmSection, algorithm: Algorithm) -> bool:
    """Return whether the loss contains a ratio to the log-probs of the sampler."""
    is_recomputed = section.needs_proximal and not section.use_decoupled_loss
    return section.use_decoupled_loss or (has_ratio(section, algorithm) and not is_recomputed)


def age_of_rollouts(config: TrainConfig) -> str:
    """Return a phrase for people: how old rollouts can be, and what corrects for it."""
    ahead = config.scheduling.max_async_rollout
    is_quantized = config.inference.inference_quantization != "none"
    if not ahead and not is_quantized:
        return "none: rollouts are sampled by the weights that they train"
    section = algorithm_in_use(config)
    if section.use_tis:
        how = f"weighted by use_tis ({section.tis_mode}, tis_cap {section.tis_cap:g})"
    elif section.use_decoupled_loss:
        how = "weighted by use_decoupled_loss"
    elif has_ratio_to_sampler(section, load_algorithm(section.algorithm)):
        how = "corrected by the ratio in the loss"
    elif section.seq_is_masking:
        how = "samples that are too far off are left out (seq_is_masking)"
    else:
        how = "not corrected: use_tis is off"
    if is_quantized:
        how = f"in 8 bits, {how}"
    if not ahead:
        return f"none: rollouts are sampled by the weights that they train, {how}"
    oldest = f"up to {ahead} version{'s'[: ahead > 1]}"
    if config.scheduling.batch_order == "finished":
        bound = config.scheduling.max_off_policy_steps
        oldest = "without a bound" if bound < 0 else f"up to {bound} versions"
        how += "; short answers are trained on earlier than long ones (batch_order 'finished')"
    return f"{oldest}, {how}"
