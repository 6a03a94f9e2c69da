"""Check the settings of a step: minibatches, filters, shaping, the reference model."""

import re
from collections.abc import Iterator

from telescope_core.base.errors import ConfigError
from telescope_train.algorithms.corrections import algorithm_in_use, has_ratio
from telescope_train.algorithms.record import load_algorithm
from telescope_train.config.fields import unused
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.accept import BUILT_IN, EXPECTED
from telescope_train.step.stream_rules import stream_problem

SWITCHES = {
    "overlong_buffer_tokens": ("overlong_penalty_factor", "overlong_penalty_factor above 0"),
    "gibberish_token_threshold": ("filter_gibberish", "filter_gibberish = true"),
    "repetition_compression_threshold": ("filter_repetition", "filter_repetition = true"),
    "kl_in_reward": ("kl_penalty_tau", "kl_penalty_tau above 0"),
    "reference_update_every": ("kl_penalty_tau", "kl_penalty_tau above 0"),
}
"""Setting -> the setting without which it has no effect, and a value for that."""
_NEEDS_SAMPLING_AHEAD = {
    "in_flight_update": ("no request is under way when weights change", ("pause",)),
    "max_off_policy_steps": ("every token is sampled by the weights that it trains", (8, 0)),
}
"""Setting of `[scheduling]` -> why it needs rollouts that are sampled ahead, and which values say
what is so without."""


def step_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in the settings of a step."""
    section = config.algorithm
    for field, (switch, remedy) in SWITCHES.items():
        if not getattr(section, switch):
            why = f"without {switch}; set {remedy}, or remove {field}"
            yield from unused(section, f"algorithm.{field}", why)
    problem = stream_problem(config)
    if problem is not None:
        yield problem
    yield from _scheduling_problems(config)
    if not config.rollout.stop:
        why = "without stop; set stop, or remove include_stop_str_in_output"
        yield from unused(config.rollout, "rollout.include_stop_str_in_output", why)
    yield from _accept_problems(config)
    yield from _minibatch_problems(config)
    yield from _epoch_problems(config)
    yield from _overlong_problems(config)
    if section.reference_model is not None:
        why = "with reference_model, which stays as it is; remove one of the two"
        yield from unused(section, "algorithm.reference_update_every", why)
    every = section.reference_update_every
    if every >= config.run.number_of_steps and section.kl_penalty_tau:
        yield (
            f"algorithm.reference_update_every ({every}) must be below run.number_of_steps "
            f"({config.run.number_of_steps}): the reference would never be updated; "
            "lower it, or use 0 for a frozen reference"
        )


def _accept_problems(config: TrainConfig) -> Iterator[str]:
    accept = config.rollout.should_accept_fn
    if accept is None:
        return
    if accept not in BUILT_IN:
        if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", accept) is None:
            yield f"rollout.should_accept_fn {EXPECTED}, got {accept!r}"
        return
    for index, entry in enumerate(config.environments):
        if (entry.group_size or config.rollout.group_size) == 1:
            where = "rollout" if entry.group_size is None else f"environments[{index}]"
            yield (
                f"rollout.should_accept_fn = {accept!r} would reject each group of {entry.name}: "
                f"it compares the rollouts of a group, and {where}.group_size is 1; raise "
                "group_size, or remove should_accept_fn"
            )


def _scheduling_problems(config: TrainConfig) -> Iterator[str]:
    section = config.scheduling
    bound, ahead = section.max_off_policy_steps, section.max_async_rollout
    yield from _unused_scheduling(config)
    if 0 <= bound < ahead:
        yield (
            f"scheduling.max_off_policy_steps ({bound}) must be at least max_async_rollout "
            f"({ahead}): a batch is begun up to {ahead} updates before it is trained, and all of "
            f"it would be thrown away; raise the first, or lower the second"
        )
    if not section.enable_prompt_prefetch:
        yield from unused(
            section,
            "scheduling.prompt_prefetch_buffer_size",
            "without enable_prompt_prefetch; set enable_prompt_prefetch = true, or remove it",
        )
    if section.batch_order == "finished" and not ahead:
        yield (
            "scheduling.batch_order = 'finished' has no effect with max_async_rollout = 0, where "
            "only one batch is sampled at a time; raise max_async_rollout, or use 'drawn'"
        )


def _unused_scheduling(config: TrainConfig) -> Iterator[str]:
    """Yield settings that were given without effect."""
    section = config.scheduling
    if not section.max_async_rollout:
        for field, (why, holds) in _NEEDS_SAMPLING_AHEAD.items():
            yield from unused(
                section,
                f"scheduling.{field}",
                f"with max_async_rollout = 0: {why}; raise max_async_rollout, or remove {field}",
                holds=holds,
            )
    open_rollouts = section.max_open_rollouts
    most = (
        section.max_concurrent_prompts_per_server
        * config.num_rollout_servers
        * config.largest_group
    )
    if not section.free_lane_after_generation and (open_rollouts or 0) >= most:
        yield (
            f"scheduling.max_open_rollouts ({open_rollouts}) has no effect with "
            "free_lane_after_generation = false, where each open rollout holds a slot and there "
            f"are {most}; lower it, or remove it"
        )
    largest = config.largest_group
    if not section.enable_individual_sample_lanes and (open_rollouts or largest) < largest:
        yield (
            f"scheduling.max_open_rollouts ({open_rollouts}) must be at least the largest "
            f"group_size ({largest}) with enable_individual_sample_lanes = false, where the "
            "rollouts of a group begin together; raise it, or lower group_size"
        )


def _minibatch_problems(config: TrainConfig) -> Iterator[str]:
    groups = config.rollout.prompts_batch_size_for_trainer
    number = config.algorithm.number_of_minibatches
    if groups % number:
        yield (
            f"algorithm.number_of_minibatches ({number}) must divide "
            f"rollout.prompts_batch_size_for_trainer ({groups}): minibatches are equal and hold "
            f"whole groups; use {_nearest_divisor(groups, number)}, or change the batch size"
        )


def _epoch_problems(config: TrainConfig) -> Iterator[str]:
    try:
        section = algorithm_in_use(config)
        algorithm = load_algorithm(section.algorithm)
    except ConfigError:
        return  # reported with the algorithm
    if section.ppo_epochs > 1 and not section.use_tis and not has_ratio(section, algorithm):
        yield (
            f"algorithm.ppo_epochs ({section.ppo_epochs}) goes through a batch again with other "
            f"weights, and nothing corrects for that: {algorithm.name} has no ratio in its loss, "
            "and use_tis is false; remove use_tis, set use_ppo_clip = true, or ppo_epochs = 1"
        )


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    return min(divisors, key=lambda number: abs(number - wanted))


def _overlong_problems(config: TrainConfig) -> Iterator[str]:
    if not config.algorithm.overlong_penalty_factor:
        return
    limits = {"rollout.max_tokens": config.rollout.max_tokens}
    for index, entry in enumerate(config.environments):
        if entry.max_tokens is not None:
            limits[f"environments[{index}] ({entry.name}): max_tokens"] = entry.max_tokens
    buffer = config.algorithm.overlong_buffer_tokens
    for where, limit in limits.items():
        if buffer >= limit:
            yield (
                f"algorithm.overlong_buffer_tokens ({buffer}) must be below {where} ({limit}), or "
                "every answer is penalized; lower it, or raise max_tokens"
            )
