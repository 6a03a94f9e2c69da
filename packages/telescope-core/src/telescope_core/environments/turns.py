"""`SingleTurnEnvironment` and `MultiTurnEnvironment`: the two common ways to play an example."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.types import Message, StopReason
from telescope_core.environments.base import Environment
from telescope_core.environments.building import class_location, require_none_of
from telescope_core.environments.episode import Episode
from telescope_core.examples.checks import checked_messages


class SingleTurnEnvironment(Environment):
    """The policy answers the prompt once, and the rollout ends."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.play is SingleTurnEnvironment.play:
            reason = "a SingleTurnEnvironment has one turn; for more, use MultiTurnEnvironment"
            require_none_of(cls, {"max_turns"}, reason=reason)

    @property
    def goes_on(self) -> bool | None:
        """False; None for a class with a `play` of its own, about which nothing is known."""
        return False if self._is_ours("play") else None

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Ask the policy for one turn."""
        completion = await episode.generate()
        truncated = completion.finish_reason == "length"
        return StopReason.LENGTH if truncated else StopReason.COMPLETED


class MultiTurnEnvironment(Environment):
    """The policy and the environment take turns until `env_response` returns None."""

    max_turns: ClassVar[int] = 10
    """Most turns of the policy in one rollout."""

    @property
    def goes_on(self) -> bool | None:
        """Whether another turn may follow; None for a class with a `play` of its own."""
        return self.max_turns > 1 if self._is_ours("play") else None

    def env_response(self, messages: Sequence[Message], episode: Episode[Any]) -> Any:
        """Return the environment's reply to the last turn; None ends the rollout.

        The reply is text, which becomes one user message, or a list of messages. `messages` is the
        conversation so far. May be async.
        """
        raise EnvironmentLoadError(
            f"{class_location(type(self))} must define env_response(self, messages, episode)"
        )

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Alternate until `env_response` returns None, a turn is truncated, or `max_turns`."""
        for turn in range(self.max_turns):
            completion = await episode.generate()
            if completion.finish_reason == "length":
                return StopReason.LENGTH
            reply = await self.caller.one(
                "play", self.env_response, tuple(episode.messages), episode
            )
            where = f"episode.messages, after {location_of(self.env_response)},"
            checked_messages(episode.messages, where=where)
            if reply is None:
                return StopReason.COMPLETED
            if turn + 1 < self.max_turns:
                episode.add(*self._as_messages(reply))
        return StopReason.MAX_TURNS

    def _as_messages(self, reply: object) -> list[Message]:
        where = f"what {location_of(self.env_response)} returns"
        if isinstance(reply, str):
            return checked_messages([Message(role="user", content=reply)], where=where)
        if isinstance(reply, list | tuple):
            return checked_messages(cast(Sequence[object], reply), where=where)
        raise EnvironmentLoadError(
            f"{location_of(self.env_response)} must return text, a list of Message or None, "
            f"got {reply!r:.80}"
        )
