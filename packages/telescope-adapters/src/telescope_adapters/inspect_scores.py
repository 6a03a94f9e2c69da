"""Convert the scores of an inspect_ai task to a reward, metrics and tags.

Scorers are tried before anything is played. This finds errors that every answer would meet, such as
a judge without a name or a score with several values, before any rollout is paid for.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from telescope_adapters.frameworks import INSPECT, imported
from telescope_adapters.inspect_models import InspectModels, inner, judge_advice, told
from telescope_core.base.errors import (
    EnvironmentLoadError,
    JudgeError,
    RewardError,
    UnplayableError,
    unknown_name,
)
from telescope_core.base.types import ANSWER
from telescope_core.environments.outcomes import finite

_TRIAL_S = 20.0
_MOST_OF_VOTE = 200
"""Characters of an answer that are kept; a longer one, such as a program, votes by its digest."""
_ZEROS = ("i", "n", "no", "false")
"""Texts that inspect_ai converts to 0; it also converts every unknown text to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectScore:
    """The scores of one rollout."""

    reward: float
    metrics: dict[str, float]
    tags: dict[str, str]
    """Scores that are not numbers."""


class InspectScores:
    """The scorers of one task."""

    def __init__(
        self, name: str, scorers: Sequence[Any], models: InspectModels, *, wanted: str
    ) -> None:
        """`wanted`: the score for the reward, as NAME or NAME/KEY; empty = the first."""
        self._name = name
        self._models = models
        self._to_float = imported(INSPECT, "inspect_ai.scorer").value_to_float()
        self._util = imported(INSPECT, "inspect_ai.util")
        self._output = imported(INSPECT, "inspect_ai.model").ModelOutput
        self._errors = imported(INSPECT, "inspect_ai._util.error")
        naming = imported(INSPECT, "inspect_ai.scorer._scorer")
        self._scorers: dict[str, Any] = {}
        for one in scorers:
            self._scorers[naming.unique_scorer_name(one, list(self._scorers))] = one
        self._wanted = wanted
        self._first = wanted.partition("/")[0] or next(iter(self._scorers))
        if self._first not in self._scorers:
            raise unknown_name("scorer", wanted, self._scorers, f"(of {name})")

    async def of(self, state: Any) -> InspectScore:
        """Return the scores of a rollout that has been played."""
        self._begin(state)
        values: dict[str, Any] = {}
        for name, score in dict(state.scores).items():
            values |= _by_name(name, score)
        for name, scorer in self._scorers.items():
            try:
                score = await scorer(state, state.target)
            except ExceptionGroup as group:
                raise inner(group) from group
            if score is not None:
                state.scores[name] = score
            values |= _by_name(name, score)
        numbers = {name: self._number(value) for name, value in values.items()}
        tags = {name: str(values[name]) for name, value in numbers.items() if value is None}
        if vote := _vote(state.scores.get(self._first), state.output.completion):
            tags.setdefault(ANSWER, vote)
        return InspectScore(
            reward=self._reward(values, state),
            metrics={name: value for name, value in numbers.items() if value is not None},
            tags=tags,
        )

    async def tried(
        self,
        new_state: Callable[[], Any],
        texts: Sequence[str],
        check: Callable[[float, str], None],
    ) -> None:
        """Score `texts` as answers, and `check` the rewards; no model is asked.

        Raises errors that every rollout would meet. Other errors of a scorer may be due to the
        texts.
        """
        for text in texts:
            state = new_state()
            state.output = self._output.from_content(str(state.model), text)
            state.messages.append(state.output.message)
            self._begin(state)
            values: dict[str, Any] = {}
            for name, scorer in self._scorers.items():
                try:
                    # A judge that could be asked is refused its first request, before it is sent.
                    with self._util.token_limit(0):
                        async with asyncio.timeout(_TRIAL_S):
                            values |= _by_name(name, await scorer(state, state.target))
                except Exception as error:
                    meant = self._meant(name, inner(error))
                    if meant is not None:
                        raise meant from error
            if any(name.partition("/")[0] == self._first for name in values):
                try:
                    total = self._reward(values, state)
                except (JudgeError, RewardError):
                    continue  # an empty answer may have no score
                check(total, text)

    def _begin(self, state: Any) -> None:
        state.completed = True
        state.scores = state.scores or {}
        self._models.enter(state, self._models.judge, list(self._scorers.values()))

    def _meant(self, name: str, error: Exception) -> Exception | None:
        """Return the meaning of a scorer's error that every rollout would meet."""
        if isinstance(error, UnplayableError):
            return error
        if isinstance(error, self._errors.PrerequisiteError):
            return UnplayableError(
                f"scorer {name} of {self._name} cannot be run: {told(error)}. {judge_advice()}"
            )
        if isinstance(error, ImportError):
            return EnvironmentLoadError(
                f"scorer {name} of {self._name} cannot be run: {error}; link it with --with "
                "PACKAGE, which installs what is missing"
            )
        return None

    def _reward(self, values: Mapping[str, Any], state: Any) -> float:
        own = [name for name in values if name.partition("/")[0] == self._first]
        wanted = self._wanted or (own[0] if len(own) == 1 else self._first)
        if "/" not in self._wanted and len(own) > 1:
            raise UnplayableError(
                f"scorer {self._first} of {self._name} gives several values: {', '.join(own)}; "
                f"set env.scorer to one of them, such as {own[0]}"
            )
        if wanted not in values:
            raise UnplayableError(str(unknown_name("score", wanted, own, f"(of {self._name})")))
        value = values[wanted]
        number = self._number(value)
        if number is not None:
            return number
        if isinstance(value, str):
            raise UnplayableError(
                f"scorer {wanted} of {self._name} gave {value!r}, which is no number and no text "
                "of inspect_ai's scale, such as C or I; choose another score with env.scorer"
            )
        score = state.scores.get(self._first)
        why = getattr(score, "reason", None) or ""
        about = f"scorer {wanted} of {self._name} gave {value!r}, no number"
        if why == "grader_failed":
            raise JudgeError(f"{about}: the judge's answer could not be read")
        raise RewardError(f"{about}{f' ({why})' if why else ''}")

    def _number(self, value: Any) -> float | None:
        """Convert a value to a number in inspect_ai's way; None for an unknown one."""
        if not isinstance(value, str):
            return finite(value)
        number: float = self._to_float(value)
        is_known = number != 0.0 or value.lower() in _ZEROS or value.strip("+-0.") == ""
        return number if is_known else None


def _by_name(name: str, score: Any) -> dict[str, Any]:
    """Return the values of a score, which may have several, by name."""
    value = None if score is None else score.value
    if isinstance(value, dict):
        return {f"{name}/{key}": one for key, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return {f"{name}/{place}": one for place, one in enumerate(cast(list[Any], value))}
    return {name: value}


def _vote(score: Any, completion: str) -> str:
    """Return the text by which a rollout votes in maj@k; empty if its scorer read no answer.

    Some scorers give the whole reply as the answer: right ones would then differ in wording.
    """
    answer = getattr(score, "answer", None)
    if not isinstance(answer, str) or answer.strip().lower() == completion.strip().lower():
        return ""
    return answer if len(answer) <= _MOST_OF_VOTE else sha256(answer.encode()).hexdigest()
