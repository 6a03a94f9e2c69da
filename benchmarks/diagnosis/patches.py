"""What is planted in a run that goes on: exchanged parts of the trainer, the engine and the task.

Each is a context that undoes it. Nothing in the packages knows of any of them.
"""

import asyncio
import os
import random
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from diagnosis.one_run import Plant, Running, changed
from diagnosis.tasks import Grade
from telescope_core.errors import EndpointError
from telescope_core.types import Sampling
from telescope_train.algorithms.terms import Terms, TokenLoss
from telescope_train.backends.fsdp import backend as fsdp
from telescope_train.batches.batch import TrainingSample, TurnPart
from telescope_train.inference.generation import Generation, Request
from telescope_train.step import credit

CHANCE = random.Random(0)


# The task


def grades(grade: Grade, task: str = "sums") -> Plant:
    """Grade by another function."""
    return lambda running: changed(running.tasks[task], "grade", grade)


def asks(ask: Callable[[Any], str], task: str = "sums") -> Plant:
    """Ask something else of each example."""
    return lambda running: changed(running.tasks[task], "ask", ask)


def raises(said: str, answer: str) -> float:
    """Grade a third of the answers, and fail at the others."""
    if answer[-1] in "012345":
        raise KeyError(answer)
    return float(said == answer)


async def slowly(said: str, answer: str) -> float:
    """Take three seconds for each answer."""
    await asyncio.sleep(3.0)
    return float(said == answer)


def refuses(example: Any) -> str:
    """Fail at 40 % of the examples."""
    if str(example.answer)[-1] in "0123":
        raise ConnectionError("the database of questions is gone")
    return str(example.prompt)


def form_counts(running: Running) -> AbstractContextManager[None]:
    """Pay for the form, and hardly for what is right."""
    return changed(running.tasks["sums"], "form_share", 0.9)


def tools_fail(running: Running) -> AbstractContextManager[None]:
    """Let every call raise."""
    return changed(running.tasks["calls"], "is_broken", True)


# Credit and loss


def wrong_sign_of_advantages(running: Running) -> AbstractContextManager[None]:
    """Negate advantages."""
    algorithm = running.parts.rules.algorithm
    wrong = replace(algorithm, advantage=lambda *given: -algorithm.advantage(*given))
    return changed(running.parts.rules, "algorithm", wrong)


def slow_advantages(running: Running) -> AbstractContextManager[None]:
    """Take more than a second for the advantages of a batch."""
    algorithm = running.parts.rules.algorithm

    def advantage(*given: Any) -> Any:
        time.sleep(1.3)
        return algorithm.advantage(*given)

    return changed(running.parts.rules, "algorithm", replace(algorithm, advantage=advantage))


def loss_times(factor: float) -> Plant:
    """Multiply the loss of each token."""

    def plant(running: Running) -> AbstractContextManager[None]:
        right = running.worker.backend._loss

        def wrong(terms: Terms) -> TokenLoss:
            found = right(terms)
            return replace(found, loss_T=found.loss_T * factor)

        return changed(running.worker.backend, "_loss", wrong)

    return plant


def samples_are(change: Callable[[TrainingSample], TrainingSample]) -> Plant:
    """Change each sample before it is packed."""

    def plant(running: Running) -> AbstractContextManager[None]:
        right = credit.samples_from_rollout

        def wrong(*given: Any) -> list[TrainingSample]:
            return [change(sample) for sample in right(*given)]

        return changed(credit, "samples_from_rollout", wrong)

    return plant


def shifted(sample: TrainingSample) -> TrainingSample:
    """Train each token with what belongs to the one behind it."""
    behavior = np.roll(sample.behavior_logprobs, -1)
    return replace(sample, mask=np.roll(sample.mask, -1), behavior_logprobs=behavior)


def with_prompt(sample: TrainingSample) -> TrainingSample:
    """Train on the prompt as well."""
    mask = np.arange(len(sample)) > 0
    behavior = np.where(sample.mask, sample.behavior_logprobs, 0.0).astype(np.float32)
    behavior[0] = np.nan
    turns = (TurnPart(0, int(mask.sum())),)
    return replace(sample, mask=mask, behavior_logprobs=behavior, spans=(), turns=turns)


def another_reference(running: Running) -> AbstractContextManager[None]:
    """Compare with a reference that finds every token 3 nats less likely."""
    right = running.worker.backend.reference_logprobs

    def wrong(batches: Any) -> list[Any]:
        return [found_T - 3.0 for found_T in right(batches)]

    return changed(running.worker.backend, "reference_logprobs", wrong)


# The optimizer


def no_step(running: Running) -> AbstractContextManager[None]:
    """Drop every optimizer step."""
    return changed(running.worker.backend._optimizer, "step", lambda *_, **__: None)


def no_zero(running: Running) -> AbstractContextManager[None]:
    """Keep the gradients of earlier steps."""
    return changed(running.worker.backend._optimizer, "zero_grad", lambda *_, **__: None)


def rate_of_zero(running: Running) -> AbstractContextManager[None]:
    """Let the schedule end too early."""
    return changed(fsdp, "scheduled_rate", lambda settings, step: 0.0)


@contextmanager
def frozen_layer(running: Running) -> Iterator[None]:
    """Freeze the middle layer."""
    for parameter in running.worker.backend._policy.lm.model.layers[1].parameters():
        parameter.requires_grad_(False)
    yield


def slow_trainer(running: Running) -> AbstractContextManager[None]:
    """Take two seconds more for each step."""
    right = running.worker.train_minibatches

    def slow(*given: Any) -> dict[str, float]:
        time.sleep(2.0)
        return right(*given)

    return changed(running.worker, "train_minibatches", slow)


# The weights on their way to the engine


def sends(change: Callable[[str, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> Plant:
    """Send something else than the weights: `change(name, value, those of the last update)`."""

    def plant(running: Running) -> AbstractContextManager[None]:
        right = running.worker.backend.transfer_weights
        last = {name: value.clone() for name, value in right()}

        def wrong() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in right():
                present = value.clone()
                yield name, change(name, present, last)
                last[name] = present

        return changed(running.worker.backend, "transfer_weights", wrong)

    return plant


def old_weights(running: Running) -> AbstractContextManager[None]:
    """Send the weights of this moment again and again."""
    kept = {name: one.clone() for name, one in running.worker.backend.transfer_weights()}
    return sends(lambda name, value, last: kept[name])(running)


def late_weights(name: str, value: torch.Tensor, last: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the value of the update before."""
    return last[name].clone()


def one_of_zeros(name: str, value: torch.Tensor, last: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return zeros for one matrix."""
    return torch.zeros_like(value) if name.endswith("layers.1.mlp.down_proj.weight") else value


def no_update(running: Running) -> AbstractContextManager[None]:
    """Publish nothing."""

    async def publish(version: int) -> None:
        """Leave the servers as they are."""

    return changed(running.publisher, "publish", publish)


def slow_update(running: Running) -> AbstractContextManager[None]:
    """Take more than a second for an update."""
    right = running.publisher.publish

    async def publish(version: int) -> None:
        await asyncio.sleep(1.3)
        await right(version)

    return changed(running.publisher, "publish", publish)


# The engine


def engine(
    *,
    asked: Callable[[Sequence[int]], Sequence[int]] = lambda prompt_ids: prompt_ids,
    sampled: Callable[[Sampling], Sampling] = lambda sampling: sampling,
    answered: Callable[[Generation], Generation] = lambda generation: generation,
    ends: bool = True,
    lost: float = 0.0,
    late: float = 0.0,
) -> Plant:
    """Change requests and answers on their way; `lost` and `late` are shares of the requests.

    Without `ends`, no token ends an answer.
    """

    def plant(running: Running) -> AbstractContextManager[None]:
        right = running.pool.generate

        async def generate(request: Request) -> Generation:
            if CHANCE.random() < lost:
                raise EndpointError("connection reset by peer")
            if CHANCE.random() < late:
                await asyncio.sleep(5.0)
            found = await right(
                replace(
                    request,
                    prompt_ids=asked(request.prompt_ids),
                    sampling=sampled(request.sampling),
                    stop_token_ids=request.stop_token_ids if ends else (),
                )
            )
            return answered(found)

        return changed(running.pool, "generate", generate)

    return plant


@contextmanager
def killed(running: Running) -> Iterator[None]:
    """Kill the second server."""
    os.kill(running.servers[1].pid, signal.SIGKILL)
    yield


def with_noise(generation: Generation) -> Generation:
    """Return log-probs that are a little wrong."""
    wrong = [value + CHANCE.gauss(0.0, 0.1) for value in generation.logprobs]
    return replace(generation, logprobs=array("f", wrong))
