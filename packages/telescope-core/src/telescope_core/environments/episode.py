"""`Episode`: the state of one rollout while it is played."""

import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_args

from telescope_core.base.code_places import called_at, shown_path
from telescope_core.base.errors import EndpointError, EnvironmentLoadError
from telescope_core.base.messages import agent_of
from telescope_core.base.protocols import Policy
from telescope_core.base.terminal import whole
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    Example,
    Message,
    Sampling,
    Tools,
    Turn,
    TurnInfo,
)
from telescope_core.environments.doing import doing
from telescope_core.environments.hooks import EpisodeStopped
from telescope_core.examples.checks import checked_messages

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    StateT = TypeVar("StateT", default=dict[str, Any])
else:
    from typing import TypeVar

    StateT = TypeVar("StateT")


NoteKind = Literal["text", "code", "stdout", "stderr"]
_NOTES = get_args(NoteKind)

NO_ENDPOINT = "has no chat endpoint"
"""Words of the error that a program gets from a policy without a server."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One call of `generate`."""

    file: str
    line: int
    answer: Coroutine[Any, Any, Completion]


class Episode(Generic[StateT]):
    """One rollout in progress: the conversation so far, and access to the policy.

    An environment reads `messages`, asks the policy for a turn with `generate`, and replies with
    `add`. `example` is the example that is played. `turns` holds the model calls so far. `state`
    is for the environment's own use and is new for each rollout: an instance of the environment's
    `State`, or a dict when it has none. `rollout_id` is that of the rollout that reward and group
    reward functions see, unique within a run. `metrics`, `tags` and the values kept with `note` are
    recorded with the rollout.
    """

    def __init__(
        self,
        example: Example,
        messages: Sequence[Message],
        *,
        policy: Policy,
        sampling: Sampling,
        state: StateT | None = None,
        rollout_id: str = "",
    ) -> None:
        self.example = example
        self.rollout_id = rollout_id
        self.messages = list(messages)
        self.num_opening_messages = len(self.messages)
        self.turns: list[Turn] = []
        self.state: StateT = cast(StateT, {}) if state is None else state
        self.metrics: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.conversations: tuple[Sequence[Message], ...] = ()
        """Conversations other than `messages`, such as those of the seats of a match."""
        self.agent_rewards: dict[str, float] = {}
        """See `Rollout.agent_rewards`."""
        self.tools: Tools = ()
        """Tools in OpenAI form for every turn, unless `generate` is given others."""
        self.info: list[TurnInfo] = []
        self.find_stop: Callable[[Episode[Any]], Awaitable[str | None]] | None = None
        """Returns the name of the `@stop` method that ends the rollout, or None."""
        self.has_given_endpoint = False
        """Whether a program was given the endpoint, which records the turns of that program."""
        self._policy = policy
        self._sampling = sampling
        self._requests: dict[object, _Request] = {}
        """Calls of `generate` that nothing has awaited yet."""

    @property
    def sampling(self) -> Sampling:
        """The sampling settings of this rollout. In training, `endpoint` applies them by itself."""
        return self._sampling

    @property
    def endpoint(self) -> ChatEndpoint:
        """The policy's endpoint, for a program that uses its own client.

        Raises EndpointError when the policy has no server, such as a scripted policy.
        """
        endpoint = self._policy.endpoint
        if endpoint is None:
            raise EndpointError(
                f"this policy ({type(self._policy).__name__}) {NO_ENDPOINT}; run an eval "
                "against a served model, or training, or use episode.generate instead"
            )
        self.has_given_endpoint = True
        return endpoint

    def generate(
        self,
        *,
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        messages: list[Message] | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """Ask the policy for the next assistant message, and append it to `messages`; await it.

        `messages` are those of the episode unless a list is given, which is then a separate
        conversation: its tokens are trained on as well, and calls for several conversations may run
        at once. `stop` are texts that end this turn, besides those of `sampling`; the answer does
        not include the one that ended it.

        `@stop` methods are checked before the model call, except in the first turn, so that they
        see the environment's reply to the turn before. They are checked again after the call
        unless `max_tokens` cut the turn.
        """
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        key = object()
        answer = self._generated(key, messages, tools, tuple(stop))
        self._requests[key] = _Request(caller.f_code.co_filename, caller.f_lineno, answer)
        return answer

    def forget_requests(self) -> list[str]:
        """Drop calls of `generate` that were never awaited, and return their locations."""
        forgotten = list(self._requests.values())
        self._requests.clear()
        for request in forgotten:
            request.answer.close()
        return [f"{shown_path(request.file)}:{request.line}" for request in forgotten]

    async def _generated(
        self,
        key: object,
        given: list[Message] | None,
        tools: Tools | None,
        stop: tuple[str, ...],
    ) -> Completion:
        self._requests.pop(key, None)
        if self.turns:
            await self._require_going_on()
        messages = self.messages if given is None else given
        where = "episode.messages" if given is None else "the messages of episode.generate"
        checked_messages(messages, where=where)
        sampling = self._sampling
        if stop:
            texts = (*sampling.stop, *(text for text in stop if text not in sampling.stop))
            sampling = replace(sampling, stop=texts, include_stop_str_in_output=False)
        started_s = time.monotonic()
        with doing("it waited for the answer of the policy"):
            completion = await self._policy.complete(
                messages, sampling, tools=self.tools if tools is None else tools
            )
        self.turns.append(
            Turn(
                completion=completion,
                started_s=started_s,
                ended_s=time.monotonic(),
                agent=agent_of(messages),
            )
        )
        messages.append(completion.message)
        if completion.finish_reason != "length":
            await self._require_going_on()
        return completion

    def add(self, *messages: Message | str) -> None:
        """Append messages from the environment to the conversation; text is a user message."""
        plain = [
            Message(role="user", content=one) if isinstance(one, str) else one for one in messages
        ]
        self.messages.extend(checked_messages(plain, where="the arguments of episode.add"))

    def note(
        self,
        key: str,
        value: str,
        *,
        kind: NoteKind = "text",
    ) -> None:
        """Record `value` under `key` with the latest turn; `kind` decides how it is shown."""
        if kind not in _NOTES:
            raise EnvironmentLoadError(
                f"{called_at()}: the kind of a note must be one of {', '.join(_NOTES)}, "
                f"got {kind!r}; value must be text"
            )
        turn = max(0, len(self.turns) - 1)
        key, value = whole(str(key)), whole(str(value))
        self.info.append(TurnInfo(turn=turn, key=key, value=value, kind=kind))

    async def _require_going_on(self) -> None:
        reason = await self.find_stop(self) if self.find_stop is not None else None
        if reason is not None:
            self.tags["stopped_by"] = reason
            raise EpisodeStopped(reason)
