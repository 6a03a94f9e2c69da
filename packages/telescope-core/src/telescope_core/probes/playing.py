"""Play scripted rollouts in this process, with the code of core that plays real ones."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from telescope_core.base.protocols import PlayRequest, Policy
from telescope_core.base.retries import as_failed, failure_text
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    Example,
    Group,
    JsonValue,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    StopReason,
)
from telescope_core.environments import Environment, Episode
from telescope_core.playing.rollout import play_rollout, score_group
from telescope_core.probes.completions import ShownExample, Try
from telescope_core.probes.judging import Played
from telescope_core.probes.meter import Cut, Limits, Meter, MeteredSpan

SAMPLING = Sampling(max_tokens=1 << 20)
ONE_ROLLOUT = Limits(own_s=20.0, wall_s=120.0)
_NEVER_S = 86400.0
"""Deadline of rollouts whose limits are watched by this module."""
_LOOK_EVERY_S = 0.1
_ENDING_S = 2.0
"""Seconds to wait for the end of a rollout that was cancelled."""
_MAX_DELAY_S = 0.004


async def asked_of(environment: Environment, num_examples: int) -> list[ShownExample]:
    """Return the first examples of the splits in turn, as the policy sees them."""
    found: list[ShownExample] = []
    # In a thread, as players do: reading a dataset may take long.
    sizes = await environment.caller.in_thread(
        lambda: {
            split: environment.fetcher.source(split).num_examples for split in environment.splits()
        }
    )
    for index in range(num_examples):
        for split, size in sizes.items():
            if size is not None and index >= size:
                continue
            example = await environment.fetcher.get(split, index)
            gold = await environment.caller.one("gold_answer", environment.gold_answer, example)
            said = cast(object, [gold] if isinstance(gold, str) else gold)
            replies = cast(Sequence[object], said) if isinstance(said, list | tuple) else ()
            found.append(
                ShownExample(
                    split=split,
                    index=index,
                    example=example,
                    opening=tuple(await environment.first_messages(example)),
                    gold=tuple(map(str, replies)),
                )
            )
    return found


async def play(
    environment: Environment,
    attempt: Try,
    meter: Meter | None = None,
    *,
    limits: Limits = ONE_ROLLOUT,
    delay_s: float = 0.0,
) -> Played:
    """Play one try to its end, or until one of its limits."""
    meter = meter or Meter()
    request = request_for(attempt.asked, attempt.kind)
    client = ScriptedClient(attempt.replies)
    policy = _Metered(client.policy(request.rollout_id), meter, delay_s)
    span = MeteredSpan(meter, limits)
    task = asyncio.create_task(_rollout(environment, request, policy, attempt.asked.example))
    while not task.done() and span.cut is None:
        await asyncio.wait([task], timeout=_LOOK_EVERY_S)
    # A rollout that ended, however late on the wall, has shown what there is to see.
    cut = Cut.OWN if span.cut is Cut.OWN else None if task.done() else Cut.WALL
    wall_s, own_s = span.wall_s, span.own_s
    rollout = await _cut_off(task, request) if cut is not None else await task
    with meter.ours():
        said = [(message.role, message.content) for message in rollout.messages]
        digest = hashlib.sha256(json.dumps(said).encode("utf-8", "replace")).hexdigest()[:16]
    return Played(
        attempt=attempt, rollout=rollout, duration_s=wall_s, own_s=own_s, cut=cut, digest=digest
    )


async def _cut_off(task: asyncio.Task[Rollout], request: PlayRequest) -> Rollout:
    """Cancel a rollout, and return a failed one in its place."""
    task.cancel()
    await asyncio.wait([task], timeout=_ENDING_S)
    return replace(
        request.rollout("validated"),
        status=RolloutStatus.FAILED,
        stop_reason=StopReason.TIMEOUT,
        error="it was ended before its end",
    )


class _Metered:
    """A scripted policy whose cost counts as the validator's, with a delay of `delay_s` seconds."""

    def __init__(self, scripted: Policy, meter: Meter, delay_s: float) -> None:
        self._scripted = scripted
        self._meter = meter
        self._delay_s = delay_s

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """None, because a script has no server."""
        return self._scripted.endpoint

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Return the next reply of the script."""
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        with self._meter.ours():
            return await self._scripted.complete(messages, sampling, tools=tools)


def request_for(asked: ShownExample, kind: str, *, deadline_s: float = _NEVER_S) -> PlayRequest:
    """Return the request for one rollout of an example."""
    return PlayRequest(
        split=asked.split,
        example_index=asked.index,
        group_id=f"{asked.split}/{asked.index}/{kind}",
        index=0,
        sampling=SAMPLING,
        deadline_s=deadline_s,
    )


async def _rollout(
    environment: Environment, request: PlayRequest, policy: Policy, example: Example
) -> Rollout:
    """Play a rollout and score it as the only one of its group."""
    rollout = await play_rollout(environment, "validated", request, policy)
    group = Group(id="g", environment="", example_id=example.id, rollouts=(rollout,))
    try:
        (scored,) = (await score_group(environment, group, example)).rollouts
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the author's code raises
        return as_failed(rollout, failure_text(error))
    return scored


async def play_group(environment: Environment, tries: Sequence[Try]) -> list[Rollout]:
    """Play tries of one example as one group, without group rewards; returns the scored ones."""
    rollouts: list[Rollout] = []
    for index, attempt in enumerate(tries):
        request = replace(request_for(attempt.asked, "group"), index=index)
        policy = ScriptedClient(attempt.replies).policy(request.rollout_id)
        rollouts.append(await play_rollout(environment, "validated", request, policy))
    return [rollout for rollout in rollouts if rollout.reward is not None]


async def score_in_order(
    environment: Environment, rollouts: Sequence[Rollout], example: Example
) -> list[Rollout]:
    """Score rollouts of one example as a group in this order."""
    placed = tuple(replace(rollout, index=index) for index, rollout in enumerate(rollouts))
    group = Group(id="g", environment="", example_id=example.id, rollouts=placed)
    return list((await score_group(environment, group, example)).rollouts)


async def play_in_turn(
    environment: Environment, tries: Iterable[Try], meter: Meter, limits: Limits
) -> list[Played]:
    """Play tries one by one; stops at a limit, or after a rollout that had to be ended.

    A part of such a rollout may still be computing, which would count as the next one's time.
    """
    played: list[Played] = []
    span = MeteredSpan(meter, limits)
    for attempt in tries:
        if span.cut is not None:
            break
        played.append(await play(environment, attempt, meter))
        if played[-1].cut is not None:
            break
    return played


async def play_at_once(
    environment: Environment,
    tries: Sequence[Try],
    meter: Meter,
    limits: Limits,
    *,
    num_at_once: int,
) -> list[Played]:
    """Play tries `num_at_once` at a time, in random order, with answers of uneven delay.

    The limits hold for all of them together, because their processor times cannot be separated.
    """
    rng = random.Random("at once")
    pending = list(tries)
    rng.shuffle(pending)
    played: list[Played] = []
    span = MeteredSpan(meter, limits)

    async def worker() -> None:
        while pending and span.cut is None:
            attempt = pending.pop()
            delay_s = rng.random() * _MAX_DELAY_S
            one = await play(environment, attempt, meter, limits=limits, delay_s=delay_s)
            if one.cut is None:
                played.append(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(worker())
    return played


def capture_episodes(environment: Environment, keep: Callable[[Episode], None]) -> None:
    """Call `keep` with every episode that `environment` plays from now on."""
    play_plain = environment.play

    async def play_watched(episode: Episode) -> StopReason | None:
        keep(episode)
        return await play_plain(episode)

    environment.play = play_watched  # pyright: ignore[reportAttributeAccessIssue]
