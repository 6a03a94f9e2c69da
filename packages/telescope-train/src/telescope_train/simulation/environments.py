"""Simulated environments: lengths of answers, numbers of turns, failures.

Everything in a rollout is computed from its id and the seed, never from the order of events. Two
schedules therefore play the same rollouts and can be compared one by one, and a fault in one place
changes nothing elsewhere.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from telescope_core.base.errors import EndpointError, ProcessDiedError
from telescope_core.base.protocols import PlayRequest, Policy
from telescope_core.base.types import (
    EnvironmentDescription,
    Example,
    Group,
    Rollout,
    RolloutStatus,
    Split,
    StopReason,
)
from telescope_train.simulation.servers import SimulatedPolicy

Lengths: TypeAlias = Callable[[random.Random], int]
"""Function that draws the number of tokens of an answer."""


class SimulatedCall(NamedTuple):
    """One model call of a rollout, in tokens."""

    num_new_tokens: int
    """Number of prompt tokens after those of the previous turn."""
    num_tokens: int
    """Number of tokens of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Properties of an environment's rollouts. Times are in seconds, lengths in tokens."""

    lengths: Lengths
    """Length of one answer."""
    num_prompt_tokens: int = 256
    """Length of the first prompt."""
    num_turns: tuple[int, int] = (1, 1)
    """Least and most answers of a rollout."""
    num_tool_tokens: int = 128
    """Length of the environment's text between two answers."""
    tool_s: float = 0.0
    """Mean time between two answers; exponential."""
    reward_s: float = 0.2
    """Time for scoring."""
    failure_rate: float = 0.0
    """Share of model calls before which the environment raises an error."""
    loss_rate: float = 0.0
    """Share of attempts whose process dies meanwhile."""
    hang_rate: float = 0.0
    """Share of attempts in which a tool never returns."""
    hung_reward_rate: float = 0.0
    """Share of attempts whose reward never ends."""

    def calls(self, chance: random.Random) -> list[SimulatedCall]:
        """Return the model calls of one rollout."""
        return [
            SimulatedCall(
                self.num_tool_tokens if turn else self.num_prompt_tokens, self.lengths(chance)
            )
            for turn in range(chance.randint(*self.num_turns))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Workload):
    """Rollouts as in a run: each is a random one of `rollouts`."""

    rollouts: Sequence[Sequence[SimulatedCall]]

    def calls(self, chance: random.Random) -> list[SimulatedCall]:
        """Return the model calls of one of the recorded rollouts."""
        return list(self.rollouts[chance.randrange(len(self.rollouts))])


@dataclass(frozen=True, slots=True)
class _Lognormal:
    mu: float
    sigma: float

    def __call__(self, chance: random.Random) -> int:
        return max(1, round(chance.lognormvariate(self.mu, self.sigma)))


@dataclass(frozen=True, slots=True)
class _Bimodal:
    short: Lengths
    long: Lengths
    share_long: float

    def __call__(self, chance: random.Random) -> int:
        return (self.long if chance.random() < self.share_long else self.short)(chance)


# No closures, so that a workload can be sent to another process.
def lognormal(mean: float, sigma: float) -> Lengths:
    """Return lengths with the given mean; `sigma` is the deviation of their logarithm."""
    return _Lognormal(math.log(mean) - sigma**2 / 2, sigma)


def bimodal(short: float, long: float, share_long: float) -> Lengths:
    """Return lengths around `short`, or around `long` for a share of the answers."""
    return _Bimodal(lognormal(short, 0.4), lognormal(long, 0.3), share_long)


WORKLOADS: Mapping[str, Workload] = {
    "reasoning": Workload(lengths=lognormal(4000, 0.9)),
    "agents": Workload(
        lengths=lognormal(300, 0.8), num_turns=(2, 40), num_tool_tokens=400, tool_s=2.0
    ),
    "bimodal": Workload(lengths=bimodal(600, 12_000, 0.15)),
}
"""Three kinds of rollouts: long thoughts, agents with many turns, and two kinds of answers."""


class SimulatedEnvironment:
    """An environment client that plays a workload; see `telescope_core.protocols`."""

    def __init__(
        self,
        workload: Workload,
        *,
        name: str = "simulated",
        seed: int = 0,
        on_end: Callable[[Rollout], None] = lambda rollout: None,
    ) -> None:
        """`on_end` is called with every attempt that has ended."""
        self.name = name
        self.drawn: list[tuple[str, int]] = []
        """(group id, total tokens of all answers) of each rollout that has begun."""
        self._workload = workload
        self._seed = seed
        self._on_end = on_end
        self._attempts: dict[str, int] = {}

    async def describe(self) -> EnvironmentDescription:
        """Return an endless training split."""
        return EnvironmentDescription(
            name=self.name,
            version="0",
            reward_min=0.0,
            reward_max=1.0,
            success_threshold=1.0,
            num_examples={Split.TRAIN: None, Split.EVAL: None},
            network="none",
        )

    async def example(self, split: Split, index: int) -> Example:
        """Return the example with this number."""
        return Example(id=f"{split}-{index}", prompt=str(index))

    async def gold(self, split: Split, index: int) -> Rollout | None:
        """Return None: there is no gold answer."""
        return None

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play one rollout; a failure is returned as one."""
        assert isinstance(policy, SimulatedPolicy), "simulated environments need such policies"
        rollout = replace(
            request.rollout(self.name), example_id=f"{request.split}-{request.example_index}"
        )
        try:
            async with asyncio.timeout(request.deadline_s):
                reward = await self._play(request, policy)
        except TimeoutError:
            ended = _failed(rollout, "TimeoutError: the deadline passed", StopReason.TIMEOUT)
            if request.scores_at_deadline:
                # An unfinished rollout earns nothing.
                ended = replace(rollout, stop_reason=StopReason.TIMEOUT, reward=0.0)
        except EndpointError as error:
            ended = _failed(rollout, f"EndpointError: {error}", StopReason.ERROR)
        except ProcessDiedError as error:
            ended = _failed(rollout, f"EnvironmentProcessError: {error}", StopReason.ERROR)
        except _RaisedError as error:
            ended = _failed(rollout, f"ValueError: {error}", StopReason.ERROR)
        else:
            ended = replace(rollout, reward=reward)
        ended = replace(ended, turns=tuple(policy.turns))
        self._on_end(ended)
        return ended

    async def score_group(self, split: Split, example_index: int, group: Group) -> Group:
        """Return the group unchanged."""
        return group

    async def cancel(self, rollout_id: str) -> None:
        """Do nothing: the player of a rollout cancels its task."""

    async def health(self) -> None:
        """Return at once."""

    def stats(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    async def close(self) -> None:
        """Do nothing."""

    async def _play(self, request: PlayRequest, policy: SimulatedPolicy) -> float:
        work = self._workload
        attempt = self._attempts[request.rollout_id] = self._attempts.get(request.rollout_id, 0) + 1
        # The lengths are those of the rollout in every attempt; only what fails may change.
        chance = random.Random(f"{self._seed}/{request.rollout_id}")
        calls = work.calls(chance)
        if attempt == 1:
            limit = request.sampling.max_tokens
            self.drawn.append((request.group_id, sum(min(one.num_tokens, limit) for one in calls)))
        fails = random.Random(f"{self._seed}/{request.rollout_id}/{attempt}")
        difficulty = random.Random(f"{self._seed}/{request.example_index}").random()
        at_loss = fails.randrange(len(calls)) if fails.random() < work.loss_rate else None
        at_hang = fails.randrange(len(calls)) if fails.random() < work.hang_rate else None
        for number, call in enumerate(calls):
            if number and work.tool_s:
                await asyncio.sleep(chance.expovariate(1 / work.tool_s))
            if fails.random() < work.failure_rate:
                raise _RaisedError("the environment failed, as the simulation planned")
            if number == at_loss:
                raise ProcessDiedError("it was killed, as the simulation planned")
            if number == at_hang:
                await asyncio.Event().wait()
            await policy.say(
                request.sampling,
                num_new_tokens=call.num_new_tokens,
                num_tokens=call.num_tokens,
            )
        if fails.random() < work.hung_reward_rate:
            await asyncio.Event().wait()
        if work.reward_s:
            await asyncio.sleep(work.reward_s)
        return float(chance.random() < difficulty)


class _RaisedError(Exception):
    """The environment's own code failed."""


def _failed(rollout: Rollout, error: str, reason: StopReason) -> Rollout:
    return replace(
        rollout,
        status=RolloutStatus.FAILED,
        status_reason=error.partition(":")[0],
        stop_reason=reason,
        error=error,
    )
