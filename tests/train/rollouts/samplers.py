"""A sampler over the smallest environment, for the tests of this folder."""

from collections.abc import Sequence
from typing import Any

from telescope_core import (
    Environment,
    Example,
    GeneratedSource,
    Message,
    Rollout,
    Sampling,
    SingleTurnEnvironment,
    Split,
    reward,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PolicySource
from telescope_core.records.events import AttemptEvent
from telescope_train.rollouts.accept import AcceptFn
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.draw import ExampleDraw, Source
from telescope_train.rollouts.held_out import TrainingExamples
from telescope_train.rollouts.playing import PlaySettings, TrainingEnvironment
from telescope_train.rollouts.sampler import RolloutSampler, SamplerSettings

GROUP_SIZE = 3
GROUPS = 2


class Echo(SingleTurnEnvironment):
    """Pays 1 for saying the prompt."""

    def examples(self, split: Split) -> GeneratedSource:
        return GeneratedSource(lambda rng, i: Example(id=f"{i}", prompt=f"p{i}"), seed=0)

    @reward
    def said_it(self, rollout: Rollout, example: Example) -> float:
        return float(rollout.completion_text == example.prompt)


class EventList(list[AttemptEvent]):
    """Takes the place of the log of events."""

    def add(self, event: AttemptEvent) -> None:
        self.append(event)

    def pack(self, step: int) -> None: ...


def sampler_over(
    client: PolicySource,
    *,
    ahead: int,
    batches: int = 4,
    accept: AcceptFn | None = None,
    environment: Environment | None = None,
    groups: int = GROUPS,
    timeout_s: float = 300.0,
    slots: int = 4,
    seed: int | None = None,
    events: "EventList | None" = None,
    **settings: Any,
) -> RolloutSampler:
    environment = TrainingEnvironment(
        client=InProcessEnvironment(environment or Echo(), name="echo"),
        group_size=GROUP_SIZE,
        sampling=Sampling(max_tokens=4),
    )
    draw = ExampleDraw([Source(environment="echo", weight=1.0, num_examples=None)], seed=0)
    sampler_settings = SamplerSettings(
        num_batches=batches,
        groups_per_batch=groups,
        max_async_rollout=ahead,
        play=PlaySettings(rollout_timeout_s=timeout_s, seed=seed, accept=accept),
        **settings,
    )
    examples = TrainingExamples(draw, {"echo": environment.client}, {})
    attempts = Attempts(slots, EventList() if events is None else events)
    return RolloutSampler({"echo": environment}, examples, client, sampler_settings, attempts)


def echo(messages: Sequence[Message]) -> str:
    return messages[-1].content
