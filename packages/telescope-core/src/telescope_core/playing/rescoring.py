"""Grade a saved rollout again, without a policy, with the present code of its environment.

A reward or metric that reads the answer, the messages, the example or the rollout is computed from
the record. One that reads the episode or its state needs a replay: the saved turns are played again
in place of a policy's, and count only if the environment responds to each as it did then. Values
that cannot be known are left out by name, and never guessed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from telescope_core.base.errors import ContextLengthError, NotGradedError
from telescope_core.base.protocols import LEFT_OUT, METRIC, RAISED, PlayRequest
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import ANSWER, CLUSTER, Example, Message, Rollout, StopReason
from telescope_core.environments.base import Environment, require_answer, with_total
from telescope_core.environments.episode import Episode
from telescope_core.environments.rewards import OF_EPISODE, ScoreFunction, evaluate
from telescope_core.environments.usage import may_ask, refused_roles
from telescope_core.playing.rollout import Playing, outcome_of
from telescope_core.records.rows import turns_in

WHOLE = "score"
"""Stands for all rewards of an environment that defines `score` itself."""


async def rescore_rollout(
    environment: Environment, name: str, request: PlayRequest, saved: Rollout
) -> Rollout:
    """Return `saved` with the grade that `environment` gives it, or a failed rollout.

    Each known part is in `rewards` and `metrics`. Others have a tag that begins with LEFT_OUT or
    RAISED; without any such tag, something other than a part failed. A rollout with an unknown
    reward, though nothing raised, fails with NotGradedError.
    """
    return await outcome_of(_Rescoring(environment, name, request, saved))


class _Rescoring(Playing):
    """A saved rollout that is graded again."""

    def __init__(
        self, environment: Environment, name: str, request: PlayRequest, saved: Rollout
    ) -> None:
        ended = ContextLengthError("the record has no further turn")
        policy = ScriptedClient([*(turn.completion for turn in saved.turns), ended]).policy("")
        super().__init__(environment, name, request, policy)
        self._saved = saved
        self._left_out: dict[str, str] = {}
        """Name of a reward or metric -> why it is not known."""
        self._has_begun = False
        """Whether an episode was set up and must be cleaned up."""

    async def play(self, example: Example) -> StopReason:
        """Play the saved rollout again if a reward or metric needs it; else use the record."""
        live = _live_parts(self._environment)
        why_not = await self._played_otherwise(example) if live else ""
        if why_not:
            await self.clean_up()
            self._has_begun = False
            self._left_out = dict.fromkeys(live, why_not)
        if why_not or not live:
            self._episode = self._recorded(example)
        return self._saved.stop_reason

    async def clean_up(self) -> list[str]:
        """Clean up what was begun, if anything was."""
        return await super().clean_up() if self._has_begun else []

    async def _played_otherwise(self, example: Example) -> str:
        """Play the saved turns; returns how that differed from the record, or an empty text."""
        if self._environment.network == "always":
            return "playing it again would use the network"
        self._has_begun = True
        try:
            await super().play(example)
        except Exception as error:  # noqa: BLE001 - a boundary: the record is graded without it
            return f"playing it again failed with {type(error).__name__}: {error}"
        assert self._episode is not None, "it was played"
        return _difference(self._saved, self._episode.messages, len(self._episode.turns))

    def _recorded(self, example: Example) -> Episode[Any]:
        """Return an episode with everything in the record, and a state that no code has used."""
        saved = self._saved
        episode: Episode[Any] = Episode(
            example,
            saved.messages,
            policy=self._policy,
            sampling=self._request.sampling,
            rollout_id=self._rollout.rollout_id,
        )
        episode.turns = list(saved.turns)
        episode.tags, episode.metrics = dict(saved.tags), dict(saved.metrics)
        # What the grader read before is no vote of the one that grades now.
        episode.tags.pop(ANSWER, None)
        if example.cluster:
            episode.tags[CLUSTER] = example.cluster
        episode.info = list(saved.info)
        return episode

    async def score(self, rollout: Rollout, episode: Episode[Any]) -> Rollout:
        """Return `rollout` with its reward; raises its first error, or NotGradedError."""
        error: Exception | None = None
        # Where judges are asked, each part is evaluated once, as that costs money.
        is_once = may_ask() and bool(_own_parts(self._environment))
        if is_once:
            require_answer(self._environment, episode.example)
        elif not self._left_out:
            try:
                scored = await super().score(rollout, episode)
            except Exception as raised:  # noqa: BLE001 - raised again once all parts are known
                error = None if refused_roles() else raised
            else:
                if not refused_roles():
                    return scored
        first = await self._part_by_part(rollout, episode)
        episode.tags |= {f"{LEFT_OUT}{name}": why for name, why in self._left_out.items()}
        if error := error or first:
            raise error
        environment = self._environment
        if is_once and not self._left_out:
            values = {**episode.metrics, **self._rollout.rewards}
            return await with_total(environment, rollout, episode.example, values)
        is_sum = type(environment).compute_reward is Environment.compute_reward
        summands = {one.name for one in _own_parts(environment) if one.kind == "reward"}
        if is_sum and not self._left_out.keys() & {WHOLE, *summands}:
            graded = replace(rollout, rewards=self._rollout.rewards, metrics=dict(episode.metrics))
            total = environment.compute_reward(graded, episode.example)
            environment.check_range(total)
            return replace(graded, reward=total)
        raise NotGradedError("; ".join(f"{name}: {why}" for name, why in self._left_out.items()))

    async def _part_by_part(self, rollout: Rollout, episode: Episode[Any]) -> Exception | None:
        """Record the value of each part that has one, and the reason for every other part.

        Returns the first error of a part.
        """
        environment = self._environment
        first: Exception | None = None
        rewards: dict[str, float] = {}
        for function in _own_parts(environment):
            name = _tag_name(function)
            if name in self._left_out:
                continue
            num_refused = len(refused_roles())
            found: dict[str, float] = {}
            try:
                found = await evaluate(
                    [function],
                    environment,
                    environment.caller,
                    rollout=rollout,
                    example=episode.example,
                    episode=episode,
                )
            except Exception as raised:  # noqa: BLE001 - a boundary: the other parts are graded
                if len(refused_roles()) == num_refused:
                    episode.tags[f"{RAISED}{name}"] = f"{type(raised).__name__}: {raised}"
                    first = first or raised
            if len(refused_roles()) > num_refused:
                self._left_out[name] = f"it asks a {refused_roles()[-1]}"
            elif function.kind == "reward":
                rewards |= found
            else:
                episode.metrics |= found
        if refused_roles() and not self._left_out:
            self._left_out[WHOLE] = f"it asks a {refused_roles()[-1]}"
        self._rollout = replace(self._rollout, rewards=rewards)
        return first


def _own_parts(environment: Environment) -> list[ScoreFunction]:
    """Return the rewards and metrics; none if the environment defines `score` itself."""
    if type(environment).score is not Environment.score:
        return []
    return [one for one in environment.score_functions if one.kind != "group_reward"]


def _live_parts(environment: Environment) -> list[str]:
    """Return the names of the parts that read more than a record holds."""
    if type(environment).score is not Environment.score:
        return [WHOLE]
    parts = _own_parts(environment)
    return [_tag_name(one) for one in parts if OF_EPISODE & set(one.parameters.names)]


def _tag_name(function: ScoreFunction) -> str:
    """Return the name of a part in tags."""
    return f"{METRIC}{function.name}" if function.kind == "metric" else function.name


def _difference(saved: Rollout, messages: Sequence[Message], num_turns: int) -> str:
    """Return how the replay differs from the record; empty if it does not. Prompts may differ."""
    then = turns_in(saved.messages, len(saved.turns))
    now = turns_in(messages, num_turns)
    assert then is not None, "who asks for it has found its turns"
    if now is None or len(now) != len(then):
        return f"played again it has {num_turns} turns, and {len(then)} in the record"
    if not then or saved.messages[then[0] :] == tuple(messages[now[0] :]):
        return ""
    said_then, said_now = saved.messages[then[0] :], messages[now[0] :]
    pairs = zip(said_then, said_now, strict=False)
    shorter = min(len(said_then), len(said_now))
    first = next((number for number, (a, b) in enumerate(pairs) if a != b), shorter)
    turn = sum(one.role == "assistant" for one in said_now[:first])
    return f"the environment says something else after turn {turn} than in the record"
