"""Environments of a run and their shares: from config entries to a sampler."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError
from telescope_core.base.protocols import EnvironmentClient, PolicySource
from telescope_core.base.types import EnvironmentDescription, Sampling, Split
from telescope_train.algorithms import load_algorithm
from telescope_train.config.schema import EnvironmentEntry, TrainConfig
from telescope_train.rollouts.accept import load_accept_fn
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.compared import reward_scale
from telescope_train.rollouts.draw import ExampleDraw, Source
from telescope_train.rollouts.held_out import HeldOut, TrainingExamples, hold_out
from telescope_train.rollouts.playing import PlaySettings, TrainingEnvironment
from telescope_train.rollouts.prefetch import Prefetch, Prepare, first_messages
from telescope_train.rollouts.sampler import RolloutSampler, SamplerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The environments for training, by the names of their entries."""

    playing: Mapping[str, TrainingEnvironment]
    """Name -> the environment with its settings for playing."""
    descriptions: Mapping[str, EnvironmentDescription]
    """Name -> the environment's own description."""
    held_out: Mapping[str, HeldOut]
    """By environment; only if an eval requires it."""

    @property
    def reward_weights(self) -> dict[str, Mapping[str, float]]:
        """Name -> the factor of each part of the environment's reward; {} = not known."""
        return {name: one.reward_weights for name, one in self.descriptions.items()}


async def training_environments(
    config: TrainConfig,
    clients: Mapping[str, EnvironmentClient],
    eval_clients: Mapping[str, EnvironmentClient],
    records: Mapping[str, EnvironmentRecord],
) -> Mix:
    """Ask each environment for its description, and combine that with the config's overrides.

    `records` says by the name of an entry which environment it is: evals may use another name.
    """
    described = await asyncio.gather(*(client.describe() for client in clients.values()))
    descriptions = dict(zip(clients, described, strict=True))
    held_out = await hold_out(config, clients, eval_clients, descriptions, records)
    return Mix(
        playing={
            entry.name: TrainingEnvironment(
                client=clients[entry.name],
                group_size=entry.group_size or config.rollout.group_size,
                sampling=sampling_of(entry, config),
            )
            for entry in config.environments
        },
        descriptions=descriptions,
        held_out=held_out,
    )


def refuse_rewards(config: TrainConfig, descriptions: Mapping[str, EnvironmentDescription]) -> None:
    """Raise ConfigError for rewards that the algorithm cannot take, or cannot take apart.

    `descriptions`: of the environments that are trained on, by name.
    """
    algorithm = load_algorithm(config.algorithm.algorithm)
    for entry in config.environments:
        low = descriptions[entry.name].reward_min
        # Now, because the first such reward may come after hours.
        if low < 0 and entry.reward_min is None and not algorithm.takes_negative_rewards:
            raise ConfigError(
                f"rewards of {entry.name} may be as low as {low:g}, and {algorithm.name} cannot "
                "take rewards below 0; give its [[environments]] entry a reward_min and a "
                "reward_max, or use grpo"
            )
    num_parts = [sum(map(bool, one.reward_weights.values())) for one in descriptions.values()]
    if config.algorithm.advantage_norm == "parts" and max(num_parts, default=0) < 2:
        raise ConfigError(
            f'advantage_norm = "parts" compares each part of a reward by itself, and '
            f"{', '.join(descriptions)} has no reward that is a sum of parts (several methods with "
            "@reward and a weight, and no compute_reward of its own); use advantage_norm = "
            '"group" or "batch"'
        )


def left_out_of_training(
    entries: Sequence[EnvironmentEntry], descriptions: Mapping[str, EnvironmentDescription]
) -> list[str]:
    """Return a line for each environment with rows that are no training examples."""
    lines: list[str] = []
    for entry in entries:
        number = descriptions[entry.name].num_dropped.get(Split(entry.split), 0)
        why = "they repeat others" + (" or evals hold them out" if entry.split == "train" else "")
        if number:
            lines.append(f"{entry.name}: rows left out of training, because {why}: {number:,}")
    return lines


def sampling_of(entry: EnvironmentEntry, config: TrainConfig) -> Sampling:
    """Return the sampling settings of rollouts of `entry`."""
    rollout = config.rollout
    return Sampling(
        max_tokens=entry.max_tokens or rollout.max_tokens,
        temperature=rollout.temperature if entry.temperature is None else entry.temperature,
        stop=rollout.stop,
        include_stop_str_in_output=bool(rollout.stop) and rollout.include_stop_str_in_output,
    )


def make_sampler(
    config: TrainConfig,
    mix: Mix,
    policies: PolicySource,
    attempts: Attempts,
    *,
    prepare: Prepare | None = None,
) -> RolloutSampler:
    """Return the sampler of a run over `mix`; `prepare` renders and tokenizes messages ahead."""
    sources = [
        Source(
            environment=entry.name,
            weight=entry.weight,
            num_examples=train_size(entry, mix.descriptions[entry.name]),
            held_out=mix.held_out.get(entry.name, HeldOut()).indices,
            split=Split(entry.split),
        )
        for entry in config.environments
    ]
    accept = config.rollout.should_accept_fn
    scale = reward_scale(config, mix.reward_weights)
    keeps_spares = accept is not None or bool(mix.held_out)

    def new_draw() -> ExampleDraw:
        return ExampleDraw(sources, seed=config.run.seed, keeps_spares=keeps_spares)

    clients = {name: one.client for name, one in mix.playing.items()}
    section = config.scheduling
    prefetch = None
    if section.enable_prompt_prefetch:
        prompts = {name: one.system_prompt for name, one in mix.descriptions.items()}
        prefetch = Prefetch(
            new_draw(),
            lambda drawn: first_messages(clients[drawn.environment], drawn, prompts),
            prepare,
            size=section.prompt_prefetch_buffer_size,
        )
    return RolloutSampler(
        mix.playing,
        TrainingExamples(new_draw(), clients, mix.held_out, prefetch),
        policies,
        SamplerSettings(
            num_batches=config.run.number_of_steps,
            groups_per_batch=config.rollout.prompts_batch_size_for_trainer,
            max_async_rollout=section.max_async_rollout,
            max_off_policy_steps=None
            if section.max_off_policy_steps < 0
            else section.max_off_policy_steps,
            is_in_drawn_order=section.batch_order == "drawn",
            play=PlaySettings(
                rollout_timeout_s=config.rollout.rollout_timeout_s,
                seed=config.run.seed if config.rollout.seed_sampling else None,
                accept=load_accept_fn(accept, scale) if accept else None,
            ),
        ),
        attempts,
    )


def train_size(entry: EnvironmentEntry, description: EnvironmentDescription) -> int | None:
    """Return how many examples `entry` trains on, None = endless; ConfigError if it has none."""
    split = Split(entry.split)
    if split not in description.num_examples:
        other = 'or set split = "eval" to train on what is evaluated'
        raise ConfigError(
            f"{description.name!r} has no {split} split, only "
            f"{', '.join(description.num_examples) or 'none'}; "
            + (f"use it in [[evals]], {other}" if split is Split.TRAIN else "remove split")
        )
    size = description.num_examples[split]
    if size == 0:
        raise ConfigError(
            f"the {split} split of {description.name!r} has no examples; check its settings"
        )
    return size
