"""Gold answers of environments as training samples, for the supervised warm start."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.open import open_environment
from telescope_core.protocols import EnvironmentClient
from telescope_core.types import Rollout, RolloutStatus, Split
from telescope_train.batch import TrainingSample
from telescope_train.config.sft_schema import SftConfig, SftEnvironment
from telescope_train.models.render import render_conversations

_CONCURRENT_GOLDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldSamples:
    """What is learnt, and what is kept aside to measure on."""

    learnt: list[TrainingSample]
    held_out: list[TrainingSample]


async def gold_samples(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> GoldSamples:
    """Draw gold answers by weight: what is learnt from train splits, the rest from eval splits."""
    total_weight = sum(environment.weight for environment in config.environments)
    learnt, held_out = [], []
    for environment in config.environments:
        share = environment.weight / total_weight
        golds = await _golds(
            environment,
            {
                Split.TRAIN: max(1, round(share * config.num_examples)),
                Split.EVAL: max(1, round(share * config.num_held_out)),
            },
        )
        learnt += _samples(golds[Split.TRAIN], tokenizer, seq_len=config.seq_len)
        held_out += _samples(golds[Split.EVAL], tokenizer, seq_len=config.seq_len)
    return GoldSamples(learnt=learnt, held_out=held_out)


async def _golds(
    environment: SftEnvironment, wanted: Mapping[Split, int]
) -> dict[Split, list[Rollout]]:
    """Return up to so many gold rollouts of each split; fewer where it is smaller."""
    client = open_environment(environment.name, dict(environment.env))
    try:
        description = await client.describe()
        golds: dict[Split, list[Rollout]] = {}
        for split, num_wanted in wanted.items():
            size = description.num_examples.get(split, 0)
            num_golds = num_wanted if size is None else min(size, num_wanted)
            if num_golds == 0:
                raise ConfigError(
                    f"environment {environment.name!r} has no examples in its {split} split; "
                    "the train split is learnt, the eval split measures"
                )
            golds[split] = []
            for start in range(0, num_golds, _CONCURRENT_GOLDS):
                indices = range(start, min(num_golds, start + _CONCURRENT_GOLDS))
                found = await asyncio.gather(*(client.gold(split, i) for i in indices))
                golds[split] += [
                    _checked(client, rollout, description.success_threshold) for rollout in found
                ]
        return golds
    finally:
        await client.close()


def _checked(client: EnvironmentClient, rollout: Rollout | None, threshold: float) -> Rollout:
    if rollout is None:
        raise ConfigError(
            f"environment {client.name!r} has no gold answers, so nothing can be learnt from it; "
            "remove it from environments"
        )
    if rollout.status is RolloutStatus.FAILED:
        raise EnvironmentLoadError(
            f"environment {client.name!r}: the gold answer of {rollout.example_id!r} failed: "
            f"{rollout.error}"
        )
    if rollout.reward is None or rollout.reward < threshold:
        raise EnvironmentLoadError(
            f"environment {client.name!r}: the gold answer of {rollout.example_id!r} earns "
            f"{rollout.reward}, below the success threshold {threshold:g}; correct the environment"
        )
    return rollout


def _samples(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, *, seq_len: int
) -> list[TrainingSample]:
    rendered = render_conversations(tokenizer, [rollout.messages for rollout in rollouts])
    samples = []
    for rollout, conversation in zip(rollouts, rendered, strict=True):
        length = len(conversation.token_ids)
        if length > seq_len:
            raise ConfigError(
                f"example {rollout.example_id!r} of {rollout.environment!r} has {length} tokens, "
                f"but seq_len is {seq_len}; raise seq_len"
            )
        samples.append(
            TrainingSample(
                token_ids=conversation.token_ids,
                mask=conversation.mask,
                behavior_logprobs=np.where(conversation.mask, 0.0, np.nan).astype(np.float32),
                advantage=1.0,
                temperature=1.0,
                oldest_version=0,
                newest_version=0,
                group_id=f"{rollout.environment}/{rollout.example_id}",
                rollout_index=0,
                environment=rollout.environment,
            )
        )
    return samples
