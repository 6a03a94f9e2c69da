"""The life of one attempt at a rollout, as a machine whose every transition is an event.

    drawn -> waiting -> environment -> scoring -> done
                           |    ^
                           v    |
                 waiting -> generating        cancelled and failed from anywhere but an end

The environment tells when scoring begins; of one that does not, it is known once the attempt has
ended, from how long it took. A reward may ask the model, too, and goes on scoring then.

A program that runs in an environment may ask the model several things at once. The attempt is then
`generating` while any server works for it, and `waiting` while it only waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from telescope_core.base.types import Rollout, RolloutStatus, WeightVersion
from telescope_core.records.events import AttemptEvent, Stage

_ENDS = frozenset({Stage.DONE, Stage.CANCELLED, Stage.FAILED})
# Another call may begin while one is under way, and a deadline may end all of them.
_FROM_PLAY = frozenset({Stage.WAITING, Stage.GENERATING, Stage.ENVIRONMENT, Stage.SCORING})
_NEXT = {
    Stage.DRAWN: frozenset({Stage.WAITING}),
    Stage.WAITING: _FROM_PLAY,
    Stage.GENERATING: _FROM_PLAY,
    Stage.ENVIRONMENT: _FROM_PLAY,
    Stage.SCORING: frozenset({Stage.WAITING, Stage.GENERATING, Stage.DONE}),
}
"""Stage -> what may follow, besides `cancelled` and `failed`."""


class _Detail(NamedTuple):
    """What some stages have besides their time; see `AttemptEvent`."""

    call: int = 0
    server: str = ""
    version: WeightVersion | None = None
    reason: str = ""


_NO_DETAIL = _Detail()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """Which attempt it is."""

    step: int
    """The step for whose batch it was drawn."""
    environment: str
    group_id: str
    index: int
    attempt: int


class AttemptLife:
    """Where one attempt is; each change of stage goes to `log`."""

    def __init__(self, key: AttemptKey, log: Callable[[AttemptEvent], None]) -> None:
        self.key = key
        self.stage = Stage.DRAWN
        self.oldest_version: WeightVersion | None = None
        """The live weights when the first model call was sent; None = none was."""
        self.num_calls = 0
        """Model calls that were sent."""
        self._log = log
        self._num_waiting = 0
        self._num_generating = 0
        self._is_scored = False
        self._last_s = 0.0
        self._emit(Stage.DRAWN)

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended, in whatever way."""
        return self.stage in _ENDS

    def waits_to_begin(self) -> None:
        """It waits for its first slot."""
        self._move(Stage.WAITING)

    def begins(self) -> None:
        """The environment begins to play it."""
        self._move(Stage.ENVIRONMENT)

    def waits(self) -> None:
        """A model call waits for a slot."""
        self._num_waiting += 1
        self._settle()

    def no_longer_waits(self) -> None:
        """The call has its slot, or was canceled before it had one."""
        self._num_waiting -= 1

    def is_sent(self, server: str, version: WeightVersion) -> None:
        """A model call was sent to `server`, under the live weights `version`."""
        self._num_generating += 1
        self.num_calls += 1
        self.goes_on(server, version)

    def goes_on(self, server: str, version: WeightVersion) -> None:
        """The latest call is continued at `server`."""
        if self.oldest_version is None:
            self.oldest_version = version
        if not self.is_over:
            self._move(Stage.GENERATING, _Detail(self.num_calls, server, version))

    def is_answered(self) -> None:
        """A model call ended, with or without an answer."""
        self._num_generating -= 1
        self._settle()

    def is_scored(self) -> None:
        """The environment begins to score it; nothing happens if it has ended already."""
        self._is_scored = True
        self._settle()

    def ends(self, rollout: Rollout) -> None:
        """The environment returned `rollout`."""
        has_score = rollout.status not in (RolloutStatus.FAILED, RolloutStatus.CANCELLED)
        if has_score or rollout.tags.get("failed_in") == "reward":
            self._was_scored(rollout.score_s)
        if rollout.status is RolloutStatus.FAILED:
            self._move(Stage.FAILED, _Detail(reason=rollout.status_reason or rollout.stop_reason))
        elif rollout.status is RolloutStatus.CANCELLED:
            self._move(Stage.CANCELLED, _Detail(reason=rollout.status_reason))
        else:
            self._move(Stage.DONE)

    def is_cancelled(self, reason: str) -> None:
        """It was stopped, for `reason`; nothing happens if it has ended already."""
        if not self.is_over:
            self._move(Stage.CANCELLED, _Detail(reason=reason))

    def fails(self, reason: str) -> None:
        """Playing it raised an error; nothing happens if it has ended already."""
        if not self.is_over:
            self._move(Stage.FAILED, _Detail(reason=reason))

    def _was_scored(self, score_s: float) -> None:
        """Note the scoring of an attempt that ends now; `score_s`: how long it took."""
        if self.stage is not Stage.SCORING:
            # When it began is what the environment told, if a call of its own goes on until now.
            self._move(Stage.SCORING, ago_s=0.0 if self._is_scored else score_s)

    def _settle(self) -> None:
        """Move to the stage that the calls under way make."""
        # A call may end after its attempt, when both are canceled.
        if self.is_over or self._num_generating:
            return
        at_rest = Stage.SCORING if self._is_scored else Stage.ENVIRONMENT
        stage = Stage.WAITING if self._num_waiting else at_rest
        if stage is not self.stage:
            self._move(stage)

    def _move(self, stage: Stage, detail: _Detail = _NO_DETAIL, *, ago_s: float = 0.0) -> None:
        if stage in (Stage.CANCELLED, Stage.FAILED):
            is_allowed = not self.is_over
        else:
            is_allowed = stage in _NEXT.get(self.stage, frozenset())
        assert is_allowed, f"an attempt went from {self.stage} to {stage}: {self.key}"
        self.stage = stage
        self._emit(stage, detail, ago_s=ago_s)

    def _emit(self, stage: Stage, detail: _Detail = _NO_DETAIL, *, ago_s: float = 0.0) -> None:
        # Events of one attempt are in order, also where a duration is rounded.
        self._last_s = max(self._last_s, asyncio.get_running_loop().time() - ago_s)
        key = self.key
        self._log(
            AttemptEvent(
                time_s=self._last_s,
                step=key.step,
                environment=key.environment,
                group_id=key.group_id,
                index=key.index,
                attempt=key.attempt,
                stage=stage,
                call=detail.call,
                server=detail.server,
                version=detail.version,
                reason=detail.reason,
            )
        )
