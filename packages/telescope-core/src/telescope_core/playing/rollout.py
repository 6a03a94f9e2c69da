"""Play one rollout: setup, prompt, turns, reward, cleanup; and score a whole group.

This is the only place that handles failures of environment code. An exception from an environment,
its reward functions or the endpoint becomes a failed rollout with the reason in `error`, even one
that would end the program or look like a cancellation. It never becomes a reward. A limit is no
failure: if the policy's context has no more room, or, on request, if the deadline passes while the
rollout is played, it is scored in its present state.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from telescope_core.base.code_places import is_authors, location_of
from telescope_core.base.errors import (
    ConfigError,
    ContextLengthError,
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    TelescopeError,
)
from telescope_core.base.protocols import LATE_SCORE_S, PlayRequest, Policy
from telescope_core.base.retries import (
    FAILED_BY,
    as_failed,
    failed_by,
    failure_text,
    is_too_long,
)
from telescope_core.base.scoring_events import scoring_begins
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.terminal import whole
from telescope_core.base.types import (
    CLUSTER,
    Example,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    StopReason,
    Turn,
    TurnInfo,
)
from telescope_core.chat.trouble import Watch, watching
from telescope_core.environments.author_errors import as_failure, contained
from telescope_core.environments.base import Environment
from telescope_core.environments.building import class_location
from telescope_core.environments.doing import Doings, doing, knowing_doings
from telescope_core.environments.episode import Episode
from telescope_core.environments.hooks import EpisodeStopped, Hook, of_kind
from telescope_core.environments.outcomes import (
    as_floats,
    checked_score,
    finite,
    gold_replies,
    started_play,
    stop_reason_of,
)
from telescope_core.environments.rewards import as_number, group_values_for
from telescope_core.environments.running import noted
from telescope_core.environments.turns import MultiTurnEnvironment
from telescope_core.environments.usage import counting

Part = TypeVar("Part")
_log = logging.getLogger(__name__)
_GOLD_DEADLINE_S = 300.0
_NO_LIMIT = Sampling(max_tokens=1 << 20)


async def play_rollout(
    environment: Environment, name: str, request: PlayRequest, policy: Policy
) -> Rollout:
    """Play and score `request`; cancellation propagates, and other failures are in the result."""
    return await outcome_of(Playing(environment, name, request, policy))


async def outcome_of(playing: "Playing") -> Rollout:
    """Play to the end, clean up, and return the rollout with what it used."""
    try:
        with counting() as usage, watching() as trouble:
            rollout = await playing.outcome(trouble)
    except BaseException:
        await playing.clean_up()
        raise
    before = playing.snapshot()
    problems = await playing.clean_up()
    rollout = _with_later(rollout, before, playing.snapshot())
    tags = {**rollout.tags, "cleanup": whole("; ".join(problems))} if problems else rollout.tags
    return replace(
        rollout,
        tags=tags,
        metrics={**rollout.metrics, **usage.metrics()},
        info=(*rollout.info, *usage.notes(turn=max(0, len(rollout.turns) - 1))),
    )


class Playing:
    """One rollout being played; subclasses may replace `play` and `score`."""

    def __init__(
        self, environment: Environment, name: str, request: PlayRequest, policy: Policy
    ) -> None:
        self._environment = environment
        self._request = request
        self._policy = policy
        self._episode: Episode[Any] | None = None
        self._stage = "play"
        self._is_playing = False
        self._scoring_since_s: float | None = None
        """Start of the scoring, on the monotonic clock; None = it has not begun."""
        self._rollout = request.rollout(name)

    async def outcome(self, trouble: Watch) -> Rollout:
        """Return the scored rollout, or a failed one."""
        with knowing_doings() as doings:
            return await self._outcome(trouble, doings)

    async def _outcome(self, trouble: Watch, doings: Doings) -> Rollout:
        deadline_s = self._request.deadline_s
        deadline = doings.deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await self._play_and_score()
        except TimeoutError as error:
            if deadline.expired() and self._is_scored_late(trouble):
                return await self._scored_late(doings)
            text = str(error) or "it was raised without a message"
            if deadline.expired() and not str(error):
                text = f"the rollout exceeded its deadline of {deadline_s:g} s{self._while(doings)}"
            if trouble.text:
                text += f", and an endpoint was in trouble: {trouble.text}"
            ended = TimeoutError(text)
            for note in getattr(error, "__notes__", ()):
                ended.add_note(note)
            return self._failed(StopReason.TIMEOUT, ended)
        except BaseException as error:  # noqa: BLE001 - a boundary: a failed rollout has a reason
            failure = as_failure(error)
            is_full = self._stage == "play" and is_too_long(failure)
            reason = StopReason.CONTEXT_LENGTH if is_full else StopReason.ERROR
            return self._failed(reason, failure)

    def _while(self, doings: Doings) -> str:
        """Return what went on when a deadline expired, as the end of a sentence."""
        if text := doings.latest():
            return f" while {text}"
        if self._stage == "reward":
            return " while it was scored"
        return " while it was played" if self._is_playing else " before it was played"

    async def clean_up(self) -> list[str]:
        """Run every cleanup to its end, even if this task is cancelled; returns the failures."""
        hooks = of_kind(self._environment.hooks, "cleanup")
        if self._episode is None or not hooks:
            return []
        problems: list[str] = []
        task = asyncio.create_task(_run_cleanups(self._environment, self._episode, hooks, problems))
        await _to_its_end(task)
        for problem in problems:
            _log.warning("%s: %s", self._request.rollout_id, problem)
        return problems

    async def _play_and_score(self) -> Rollout:
        environment = self._environment
        example = await environment.fetcher.get(self._request.split, self._request.example_index)
        self._rollout = replace(self._rollout, example_id=example.id)
        stop_reason = await self.play(example)
        assert self._episode is not None, "what was played has an episode"
        return await self._scored(self._episode, stop_reason)

    async def play(self, example: Example) -> StopReason:
        """Play `example` in a new episode, and return its stop reason."""
        environment = self._environment
        messages = await environment.first_messages(example)
        episode = self._episode = Episode(
            example,
            messages,
            policy=self._policy,
            sampling=self._request.sampling,
            state=environment.new_state(),
            rollout_id=self._rollout.rollout_id,
        )
        if example.cluster:
            episode.tags[CLUSTER] = example.cluster
        if of_kind(environment.hooks, "stop"):
            episode.find_stop = environment.find_stop
        for hook in of_kind(environment.hooks, "setup"):
            await environment.caller.one("setup", getattr(environment, hook.name), episode)
        self._is_playing = True
        try:
            return await _played(environment.play, episode)
        except (ContextLengthError, EndpointError) as error:
            # The first turn must fit. If it does not, the settings are wrong.
            if not episode.turns or not is_too_long(error):
                raise
            episode.note("context_length", f"{error} ({self._who_wrote_the_prompt()})")
            return StopReason.CONTEXT_LENGTH

    async def score(self, rollout: Rollout, episode: Episode[Any]) -> Rollout:
        """Return `rollout`, which was played in `episode`, with its reward."""
        return await score_rollout(self._environment, rollout, episode.example, episode=episode)

    async def _scored(self, episode: Episode[Any], stop_reason: StopReason) -> Rollout:
        notes = _those(episode.info, TurnInfo)
        if len(notes) != len(cast(Sequence[object], episode.info)):
            raise EnvironmentLoadError(
                f"{location_of(self._environment.play)}: episode.info holds what is no note; add "
                "notes with episode.note(key, text)"
            )
        play = self._environment.play
        episode.metrics = as_floats(episode.metrics, where=partial(location_of, play))
        self._rollout = replace(self.snapshot(), stop_reason=stop_reason)
        self._stage = "reward"
        self._scoring_since_s = time.monotonic()
        scoring_begins()
        scored = await self.score(self._rollout, episode)
        episode.metrics = as_floats(episode.metrics, where=self._who_scores)
        return _with_later(scored, self._rollout, self.snapshot())

    def _who_scores(self) -> str:
        """Return the places of the methods that may have changed the episode by scoring it."""
        environment = self._environment
        functions = [f for f in environment.score_functions if "episode" in f.parameters.names]
        methods = [getattr(environment, one.name) for one in functions] or [environment.score]
        return " or ".join(map(location_of, methods))

    def _is_scored_late(self, trouble: Watch) -> bool:
        """Return whether the deadline limits the policy, rather than the code around it."""
        is_at_play = self._is_playing and self._stage == "play"
        return self._request.scores_at_deadline and is_at_play and not trouble.text

    async def _scored_late(self, doings: Doings) -> Rollout:
        """Return the rollout in its state at the deadline, scored."""
        assert self._episode is not None, "nothing is played without an episode"
        try:
            doings.under_way = []
            async with asyncio.timeout(LATE_SCORE_S) as doings.deadline:
                return await self._scored(self._episode, StopReason.TIMEOUT)
        except TimeoutError:
            text = (
                f"the rollout exceeded its deadline of {self._request.deadline_s:g} s, and what "
                f"was there could not be scored within {LATE_SCORE_S:g} s{self._while(doings)}"
            )
            return self._failed(StopReason.TIMEOUT, TimeoutError(text))
        except BaseException as error:  # noqa: BLE001 - a boundary: a failed rollout has a reason
            return self._failed(StopReason.TIMEOUT, as_failure(error))

    def snapshot(self) -> Rollout:
        """Return the rollout with what its episode holds at present."""
        episode = self._episode
        if episode is None:
            return self._rollout
        return replace(
            self._rollout,
            messages=_those(episode.messages, Message),
            turns=_those(episode.turns, Turn),
            tags={whole(str(k)): whole(str(v)) for k, v in _items(episode.tags)},
            metrics=_numbers(episode.metrics),
            info=_those(episode.info, TurnInfo),
            conversations=tuple(_those(one, Message) for one in episode.conversations),
            agent_rewards=dict(episode.agent_rewards),
        )

    def _failed(self, stop_reason: StopReason, error: Exception) -> Rollout:
        if self._episode is not None and isinstance(error, AttributeError | TypeError):
            for place in self._episode.forget_requests():
                error.add_note(f"generate() was called without await at {place}")
        if self._stage == "play" and is_too_long(error):
            error.add_note(self._who_wrote_the_prompt())
        failed = as_failed(self.snapshot(), failure_text(error), stop_reason)
        since_s = self._scoring_since_s
        score_s = 0.0 if since_s is None else time.monotonic() - since_s
        tags = {**failed.tags, "failed_in": self._stage, FAILED_BY: failed_by(error)}
        return replace(failed, tags=tags, score_s=score_s)

    def _who_wrote_the_prompt(self) -> str:
        environment, example_id = self._environment, self._rollout.example_id
        is_first = self._episode is None or not self._episode.turns
        method = environment.format_prompt if is_first else environment.play
        if isinstance(environment, MultiTurnEnvironment) and not is_first:
            method = environment.env_response
        is_own = is_authors(method)
        writer = location_of(method) if is_own else class_location(type(environment))
        return f"example {example_id!r}; to make it shorter, look at {writer}"


def _those(values: object, kind: type[Part]) -> tuple[Part, ...]:
    """Return the parts of type `kind` in `values`, which the author may have set to anything."""
    parts = cast(Sequence[object], values) if isinstance(values, list | tuple) else ()
    return tuple(part for part in parts if isinstance(part, kind))


def _with_later(rollout: Rollout, before: Rollout, after: Rollout) -> Rollout:
    """Return `rollout` with what its episode got between two snapshots; its own changes win."""
    own_notes = [note for note in rollout.info if note not in before.info]
    return replace(
        rollout,
        metrics=_updated(rollout.metrics, before.metrics, after.metrics),
        tags=_updated(rollout.tags, before.tags, after.tags),
        agent_rewards=_updated(rollout.agent_rewards, before.agent_rewards, after.agent_rewards),
        info=(*after.info, *own_notes),
    )


def _updated(
    values: Mapping[str, Part], before: Mapping[str, Part], after: Mapping[str, Part]
) -> dict[str, Part]:
    kept = {name: value for name, value in values.items() if name in after or name not in before}
    changed = {
        name: value
        for name, value in after.items()
        if before.get(name) != value and values.get(name) == before.get(name)
    }
    return {**kept, **changed}


def _items(values: object) -> list[tuple[object, object]]:
    """Return the items of a dict, which the author may have set to anything.

    They are copied, as a cleanup that is too late may go on in its thread.
    """
    return (
        [*dict(cast(Mapping[object, object], values)).items()]
        if isinstance(values, Mapping)
        else []
    )


def _numbers(metrics: object) -> dict[str, float]:
    """Return those metrics of an unfinished rollout that can be sent and saved."""
    numbers = {str(name): finite(value) for name, value in _items(metrics)}
    return {name: number for name, number in numbers.items() if number is not None}


async def score_rollout(
    environment: Environment,
    rollout: Rollout,
    example: Example,
    *,
    episode: Episode[Any] | None = None,
) -> Rollout:
    """Return `rollout` with its reward, rewards by name and metrics.

    Without `episode`, reward functions that take an episode get one with only the messages.
    """
    if episode is None:
        policy = ScriptedClient([]).policy("")
        state = environment.new_state()
        episode = Episode(
            example,
            rollout.messages,
            policy=policy,
            sampling=_NO_LIMIT,
            state=state,
            rollout_id=rollout.rollout_id,
        )
    started_s = time.monotonic()
    with doing("score", environment.score):
        value: object = await environment.score(rollout, example, episode)
    scored = checked_score(value, method=environment.score)
    return replace(scored, score_s=time.monotonic() - started_s)


async def play_gold(
    environment: Environment, name: str, split: Split, index: int
) -> Rollout | None:
    """Play the gold answer in place of the policy, turn by turn; None when there is none."""
    example = await environment.fetcher.get(split, index)
    gold = await environment.caller.one("gold_answer", environment.gold_answer, example)
    replies = gold_replies(gold, method=environment.gold_answer)
    if replies is None:
        return None
    request = PlayRequest(
        split=split,
        example_index=index,
        group_id="gold",
        index=0,
        sampling=_NO_LIMIT,
        deadline_s=_GOLD_DEADLINE_S,
    )
    script = ScriptedClient(replies)
    rollout = await play_rollout(environment, name, request, script.policy(""))
    if rollout.status is RolloutStatus.FAILED:
        raise TelescopeError(f"the gold answer of example {example.id!r} failed: {rollout.error}")
    return replace(rollout, tools=script.tools[-1]) if script.tools else rollout


async def _played(play: Callable[[Episode[Any]], Any], episode: Episode[Any]) -> StopReason:
    """Run the author's `play`, which a `@stop` method may end early."""
    try:
        with contained(), doing("play", play):
            value: object = await noted(started_play(play, episode), play, "play")
        return stop_reason_of(value, play=play, episode=episode)
    except EpisodeStopped:
        return StopReason.COMPLETED
    except ExceptionGroup as group:
        if group.split(EpisodeStopped)[1] is None:
            return StopReason.COMPLETED
        raise
    except Exception as error:
        if is_authors(play) and not isinstance(error, ConfigError | EndpointError):
            error.add_note(f"in {location_of(play)}")
        raise


async def _run_cleanups(
    environment: Environment, episode: Episode[Any], hooks: Sequence[Hook], problems: list[str]
) -> None:
    for hook in reversed(hooks):
        method = getattr(environment, hook.name)
        before = copy(episode.metrics)
        try:
            async with asyncio.timeout(hook.deadline_s):
                await environment.caller.one("cleanup", method, episode)
            if episode.metrics != before:
                as_floats(episode.metrics, where=partial(location_of, method))
        except TimeoutError:
            problems.append(f"cleanup {hook.name} did not end within {hook.deadline_s:g} s")
        except Exception as error:  # noqa: BLE001 - a boundary: the other cleanups must run
            problems.append(f"cleanup {hook.name} raised {type(error).__name__}: {error}")


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait until `task` ends; a cancellation of this task is raised only after that."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def score_group(environment: Environment, group: Group, example: Example) -> Group:
    """Add the group rewards, which see all rollouts at once, to every scored rollout of `group`."""
    functions = [f for f in environment.score_functions if f.kind == "group_reward"]
    scored = tuple(rollout for rollout in group.rollouts if rollout.reward is not None)
    if not functions or not scored:
        return group
    terms = [[cast(float, rollout.reward)] for rollout in scored]
    parts: list[dict[str, float]] = [dict(rollout.rewards) for rollout in scored]
    with counting() as usage:
        for function in functions:
            method = getattr(environment, function.name)
            names = function.parameters.names
            arguments = group_values_for(names, rollouts=scored, example=example)
            found = await environment.caller.one("group_reward", method, *arguments)
            for index, value in enumerate(_values(found, method, len(scored))):
                parts[index][function.name] = value
                terms[index].append(function.weight * value)
    spent = usage.metrics(share=1 / len(scored))
    totals = [math.fsum(one) for one in terms]
    for total in totals:
        environment.check_range(total)
    by_index = {
        rollout.index: replace(
            rollout,
            reward=total,
            rewards=part,
            metrics=_plus(rollout.metrics, spent),
            info=(*rollout.info, *usage.notes(turn=max(0, len(rollout.turns) - 1))),
        )
        for rollout, total, part in zip(scored, totals, parts, strict=True)
    }
    rollouts = tuple(by_index.get(rollout.index, rollout) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def _values(found: object, method: object, expected: int) -> list[float]:
    values = cast(Sequence[object], found) if isinstance(found, list | tuple) else ()
    what = f"group_reward {location_of(method)}"
    if len(values) != expected:
        raise RewardError(
            f"{what} must return a list of {expected} numbers, one for each rollout in `rollouts`, "
            f"got {found!r:.80}"
        )
    return [as_number(value, what=lambda: f"each value of {what}") for value in values]


def _plus(metrics: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    return {**metrics, **{name: metrics.get(name, 0.0) + value for name, value in spent.items()}}
