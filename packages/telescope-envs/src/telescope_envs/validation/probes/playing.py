"""Playing scripted rollouts in this process, with the code of core that plays real ones."""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from telescope_core.environments import Environment, Episode
from telescope_core.group_rewards import score_group
from telescope_core.protocols import PlayRequest
from telescope_core.rollout import play_rollout
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Group, Rollout, RolloutStatus, Sampling, StopReason
from telescope_envs.validation.probes.completions import Asked, Try
from telescope_envs.validation.probes.judging import Played

SAMPLING = Sampling(max_tokens=1 << 20)
DEADLINE_S = 20.0
_MAX_DELAY_S = 0.004


async def asked_of(environment: Environment, num_examples: int) -> list[Asked]:
    """Return the first examples of each split, alternating splits, as the policy sees them."""
    found: list[Asked] = []
    sizes = {split: environment.examples(split).num_examples for split in environment.splits()}
    for index in range(num_examples):
        for split, size in sizes.items():
            if size is not None and index >= size:
                continue
            example = await environment.fetcher.get(split, index)
            gold = await environment.caller.one("gold_answer", environment.gold_answer, example)
            found.append(
                Asked(
                    split=split,
                    index=index,
                    example=example,
                    opening=tuple(await environment.first_messages(example)),
                    gold=_replies(gold),
                )
            )
    return found


def _replies(gold: object) -> tuple[str, ...]:
    if gold is None:
        return ()
    if isinstance(gold, str):
        return (gold,)
    return tuple(map(str, cast(Sequence[object], gold))) if isinstance(gold, list | tuple) else ()


async def play(environment: Environment, attempt: Try, *, delay_s: float = 0.0) -> Played:
    """Play one try to its end."""
    request = request_for(attempt.asked, attempt.kind)
    client = ScriptedClient(attempt.replies, delay_s=delay_s)
    started_s = time.perf_counter()
    rollout = await play_rollout(
        environment, "validated", request, client.policy(request.rollout_id)
    )
    rollout = await _with_group_rewards(environment, rollout, attempt.asked)
    said = [(message.role, message.content) for message in rollout.messages]
    return Played(
        attempt=attempt,
        rollout=rollout,
        duration_s=time.perf_counter() - started_s,
        digest=hashlib.sha256(json.dumps(said).encode("utf-8", "replace")).hexdigest()[:16],
    )


def request_for(asked: Asked, kind: str, *, deadline_s: float = DEADLINE_S) -> PlayRequest:
    """Return the request for one rollout of an example."""
    return PlayRequest(
        split=asked.split,
        example_index=asked.index,
        group_id=f"{asked.split}/{asked.index}/{kind}",
        index=0,
        sampling=SAMPLING,
        deadline_s=deadline_s,
    )


async def _with_group_rewards(environment: Environment, rollout: Rollout, asked: Asked) -> Rollout:
    """Return the rollout as the only one of its group."""
    group = Group(id="g", environment="", example_id=asked.example.id, rollouts=(rollout,))
    try:
        (scored,) = (await score_group(environment, group, asked.example)).rollouts
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the author's code raises
        return replace(
            rollout,
            status=RolloutStatus.FAILED,
            stop_reason=StopReason.ERROR,
            error=f"{type(error).__name__}: {error}",
            reward=None,
        )
    return scored


async def play_in_turn(
    environment: Environment, tries: Iterable[Try], *, limit_s: float
) -> list[Played]:
    """Play tries one by one, and start none after `limit_s` seconds."""
    played: list[Played] = []
    deadline_s = time.perf_counter() + limit_s
    for attempt in tries:
        if time.perf_counter() > deadline_s:
            break
        played.append(await play(environment, attempt))
    return played


async def play_at_once(
    environment: Environment, tries: Sequence[Try], *, num_at_once: int, limit_s: float
) -> list[Played]:
    """Play tries `num_at_once` at a time, in random order, with answers of uneven delay."""
    rng = random.Random("at once")
    pending = list(tries)
    rng.shuffle(pending)
    played: list[Played] = []
    deadline_s = time.perf_counter() + limit_s

    async def lane() -> None:
        while pending and time.perf_counter() < deadline_s:
            attempt = pending.pop()
            delay_s = rng.random() * _MAX_DELAY_S
            played.append(await play(environment, attempt, delay_s=delay_s))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(lane())
    return played


def capture_episodes(environment: Environment, keep: Callable[[Episode], None]) -> None:
    """Call `keep` with every episode that `environment` plays from now on."""
    play_plain = environment.play

    async def play_watched(episode: Episode) -> StopReason:
        keep(episode)
        return await play_plain(episode)

    environment.play = play_watched  # pyright: ignore[reportAttributeAccessIssue]
