"""Check before training that inference engine and trainer agree on log-probs.

A few short answers are sampled through the run's own policy and template, and then scored by the
trainer. A wrong temperature, template, dtype or set of weights shows up here instead of as a slow
drift.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError, EndpointError
from telescope_core.base.protocols import PolicySource
from telescope_core.base.types import Completion, Message, Rollout, Sampling, Turn, WeightVersion
from telescope_train.batches.batch import Shards, TrainingSample
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.diagnostics.rank_checks import SelfTest

PROMPTS = ("2 + 2 =", "one, two, three", "Hello!", "a b c d")
MAX_TOKENS = 8
"""Most tokens of each answer."""
DEADLINE_S = 120.0
"""Time limit in seconds for all answers together."""
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "fp8": 0.3}
"""Type of the engine's computation -> largest mean difference, nats, due to rounding."""

LOADED_WRONGLY = 3.0
"""Multiple of these beyond which weights of an update are not those of the trainer."""


async def check_engine(
    policies: PolicySource,
    sampling: Mapping[str, Sampling],
    packing: Packing,
    logprobs: Callable[[Shards], Awaitable[list[list[NDArray[np.float32]]]]],
    *,
    dtype: str,
    why_silent: Callable[[], str] = lambda: "",
) -> SelfTest:
    """Return the mean difference of log-probs, nats, over the tokens of a few answers.

    `logprobs` is the trainer's function, `dtype` a key of `LIMITS`; `why_silent` says why a server
    was lost. Raises
    ConfigError if the difference is larger than rounding explains, and EndpointError if the
    servers do not answer in time.
    """
    kinds = list(sampling.values())
    asked = [(prompt, kinds[n % len(kinds)]) for n, prompt in enumerate(PROMPTS)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(
                *(_ask(policies, n, prompt, how) for n, (prompt, how) in enumerate(asked))
            )
    except TimeoutError:
        raise EndpointError(
            f"the inference servers did not answer {len(PROMPTS)} short prompts within "
            f"{DEADLINE_S:g} s: {why_silent() or 'no server was lost; see logs/inference-*'}"
        ) from None
    samples = [sample for answer in answers for sample in answer]
    shards = pack_with(samples, np.ones(len(samples)), packing)
    return SelfTest(
        name="engine and trainer agree",
        value=mean_difference(shards, await logprobs(shards)),
        limit=LIMITS[dtype],
        unit="nats on average",
        remedy="the servers sample from another model than the one in training, or not with the "
        "log-probs that they report; compare model, chat_template and mixed_precision_dtype of "
        "the two, and with use_lora set model_dtype to the type in the model's files: servers hold "
        "the frozen weights as they are there",
    ).require()


class UpdateCheck:
    """Compares what the engine samples after its first update of weights with the self-test.

    The self-test sees weights that the engine read from files. Those of an update take another way,
    and an engine that prepares them otherwise samples from a model that nobody trains.
    """

    def __init__(
        self, agreement: SelfTest, first_version: WeightVersion, *, is_exact: bool
    ) -> None:
        """`agreement`: what `check_engine` found with the weights of `first_version`.

        `is_exact`: False if log-probs may differ for other reasons too, so that nothing can be
        said: those of tokens sampled with mixed weights, or of passes with dropout.
        """
        self._agreement = agreement
        self._first_step = first_version + 1
        self._is_done = not is_exact

    def note(self, step: int, row: Mapping[str, float]) -> None:
        """Raise ConfigError if the first such `row` shows that an update was loaded wrongly.

        Wrongly is a mean difference that is much larger than rounding explains, and than it was
        before: the answers of a step are longer than those of the self-test.
        """
        nats = row.get("mismatch/mean")
        if self._is_done or nats is None or step <= self._first_step:
            return
        self._is_done = True
        before = self._agreement
        if not nats <= max(LOADED_WRONGLY * before.limit, 10 * before.value):
            raise ConfigError(
                f"after an update of weights, engine and trainer differ by {nats:.3g} nats on "
                f"average, and before it by {before.value:.3g}: the servers do not sample from the "
                "weights that were sent to them. Remove vllm_arguments and inference_quantization "
                "to see whether they are the reason, and compare the version of vLLM with the one "
                "that Telescope is made for (telescope-train[vllm])"
            )


def mean_difference(shards: Shards, logprobs: Sequence[Sequence[NDArray[np.float32]]]) -> float:
    """Return the mean of |trainer - engine| over all trained tokens of [rank][batch], nats."""
    differences = [
        np.abs(found_T - batch.behavior_logprobs_T)[batch.mask_T]
        for shard, answer in zip(shards, logprobs, strict=True)
        for batch, found_T in zip(shard, answer, strict=True)
    ]
    return float(np.concatenate(differences).mean())


async def _ask(
    policies: PolicySource, number: int, prompt: str, sampling: Sampling
) -> list[TrainingSample]:
    policy = policies.policy(f"self-test.{number}/0")
    short = replace(sampling, max_tokens=min(MAX_TOKENS, sampling.max_tokens), stop=())
    answer = await policy.complete((Message(role="user", content=prompt),), short)
    return samples_from_rollout(_rollout(answer, number), 0.0, sampling.temperature)


def _rollout(completion: Completion, number: int) -> Rollout:
    return Rollout(
        environment="self-test",
        example_id=f"{number}",
        group_id=f"self-test.{number}",
        index=0,
        turns=(Turn(completion=completion, started_s=0.0, ended_s=0.0),),
    )
