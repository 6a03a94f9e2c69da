"""`MatchEnvironment`: a match of two to eight seats, each played by the policy or another model.

Every seat has a conversation of its own and its own reward, so the policy may play several seats
of one match: each is then compared with the same seat in the other rollouts of the example.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import (
    ConfigError,
    ContextLengthError,
    EndpointAccessError,
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    unknown_name,
)
from telescope_core.base.messages import agent_of, message_to_json
from telescope_core.base.retries import is_too_long
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    Example,
    Message,
    Rollout,
    StopReason,
)
from telescope_core.chat.client import ChatClient
from telescope_core.chat.http import HttpPool, RequestLimits
from telescope_core.environments.base import Environment
from telescope_core.environments.building import class_location
from telescope_core.environments.episode import Episode
from telescope_core.environments.outcomes import finite
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.gateway.request import OLDER_VERSION
from telescope_core.models.helper_models import HelperModel, HelperModelConfig, Temperature

OTHERS = "others"
"""Stands for every seat but one in the setting `opponents`."""
MAX_SEATS = 8
_UNTIL_ITS_ROLLOUT_ENDS_S = 30 * 24 * 3600.0
"""The deadline of the rollout ends a request, as it ends those to the policy."""


class OpponentConfig(HelperModelConfig):
    """Settings of a model that plays against the policy."""

    temperature: Temperature = 1.0
    older_version: bool = False
    """Let an older version of the policy play, in place of a model at an endpoint. Training runs
    have them with `opponent_num_servers`; they are sampled as the policy is."""


class MatchConfig(EnvironmentConfig):
    """Settings of a match: the opponents of the policy."""

    opponents: dict[str, OpponentConfig] = Field(default_factory=dict[str, OpponentConfig])
    """Models at endpoints, by the seat that each plays; the policy plays the remaining seats.
    `others` = all seats but one, which is another one from example to example. Without any, the
    policy plays every seat, against itself."""


class OlderVersion:
    """The older version of the policy that plays in one rollout of a training run."""

    def __init__(self, endpoint: ChatEndpoint, pool: HttpPool, *, role: str) -> None:
        """`endpoint`: that of the rollout, which answers for an older version as well."""
        self._client = ChatClient(
            endpoint.base_url,
            OLDER_VERSION,
            api_key=endpoint.api_key,
            limits=RequestLimits(request_timeout_s=_UNTIL_ITS_ROLLOUT_ENDS_S),
            pool=pool,
        )
        self._role = role
        self.versions = set[int]()
        """Versions of the weights that have answered so far."""

    async def complete(self, messages: Sequence[Message]) -> Completion:
        """Return its answer; raises ContextLengthError once `messages` have no room for one."""
        try:
            # Without settings: an older version is sampled as the policy is.
            completion = await self._client.request(
                {"messages": [message_to_json(one) for one in messages]}
            )
        except EndpointAccessError as error:
            if "model_not_found" not in error.answer:
                raise
            raise EndpointAccessError(
                f"{self._role} is to be an older version of the policy, and here is none: a "
                "training run has them with inference.opponent_num_servers; in an eval, give the "
                "base_url of a model",
                status=error.status,
                answer=error.answer,
            ) from error
        except EndpointError as error:
            if is_too_long(error):
                raise ContextLengthError(f"{self._role}: {error}") from error
            raise
        # Two, if the server was lost or got its next version in the middle of the answer.
        self.versions |= {completion.oldest_version, completion.newest_version}
        return completion


class Seat:
    """One player of a match: its name, its conversation, and the model that answers."""

    def __init__(
        self,
        name: str,
        episode: Episode[Any],
        opening: list[Message],
        opponent: HelperModel | OlderVersion | None,
    ) -> None:
        """`opponent`: None = the policy plays here."""
        self.name = name
        self.messages = opening
        self.was_cut = False
        """Whether the latest answer was cut at `max_tokens`; not known for an opponent."""
        self._episode = episode
        self._opponent = opponent

    @property
    def is_policy(self) -> bool:
        """Whether the policy plays here; it is then trained on these answers."""
        return self._opponent is None

    @property
    def player(self) -> str:
        """The player here: `policy`, `opponent`, or `version` and the numbers of older weights."""
        if isinstance(self._opponent, OlderVersion):
            return " ".join(["version", *map(str, sorted(self._opponent.versions))])
        return "policy" if self.is_policy else "opponent"

    async def ask(self, text: str) -> str:
        """Send `text` to the seat, and return its answer, which is also appended to `messages`."""
        last = self.messages[-1]
        if last.role == "user":
            # Chat templates of some models refuse two messages of the user in a row.
            self.messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
        else:
            self.messages.append(Message(role="user", content=text))
        if isinstance(self._opponent, OlderVersion):
            completion = await self._opponent.complete(self.messages)
            self.messages.append(completion.message)
        elif self._opponent is None:
            completion = await self._episode.generate(messages=self.messages)
        else:
            answer = await self._opponent.ask(self.messages, str, wanted="your move")
            self.messages.append(Message(role="assistant", content=answer))
            return answer
        self.was_cut = completion.finish_reason == "length"
        return completion.message.content


class Match:
    """One match that is being played. `match["x"]` is the seat with that name."""

    def __init__(self, episode: Episode[Any], seats: Mapping[str, Seat]) -> None:
        self.episode = episode
        self.seats = seats

    @property
    def example(self) -> Example:
        """The example that this match plays."""
        return self.episode.example

    def __getitem__(self, name: str) -> Seat:
        if name not in self.seats:
            raise unknown_name("seat", name, self.seats)
        return self.seats[name]


class MatchEnvironment(Environment):
    """A match: set `seats`, and define `play_match`, which says what each seat has earned.

    The reward of the rollout is the mean over the seats of the policy. In training, each seat is
    credited with its own reward.
    """

    Config = MatchConfig
    seats: ClassVar[tuple[str, ...]] = ()
    """Names of the seats, two to eight."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        where = class_location(type(self))
        _require_seats(self.seats, where)
        scores = [one.name for one in self.score_functions if one.kind != "metric"]
        if scores:
            raise EnvironmentLoadError(
                f"{where}: {scores[0]} would score the match as a whole, but each seat has a "
                "reward of its own; return it from play_match, or make it a @metric"
            )
        if not isinstance(self.config, MatchConfig):
            raise EnvironmentLoadError(
                f"{where}: its Config has no opponents; write class Config(MatchConfig)"
            )
        opponents = self.config.opponents
        known = (*self.seats, OTHERS)
        for name in opponents:
            if name not in known:
                raise unknown_name("seat", name, known, f"(env.opponents of {where})")
        if all(name in opponents for name in self.seats):
            raise ConfigError(
                f"{where}: opponents play every seat, which leaves none to the policy; leave one "
                f"of {', '.join(self.seats)} out of env.opponents"
            )
        for name, one in opponents.items():
            if one.older_version and (others := one.model_fields_set - {"older_version"}):
                raise ConfigError(
                    f"{where}: opponents.{name} is an older version of the policy, which is "
                    f"sampled as the policy is; leave {', '.join(sorted(others))} out of it"
                )
        self._opponents: dict[str, HelperModel | Literal["older-version"]] = {
            name: OLDER_VERSION
            if one.older_version
            else HelperModel(one, self, role=f"opponents.{name}")
            for name, one in opponents.items()
        }
        if OLDER_VERSION in self._opponents.values():
            self._pool = HttpPool()
            self.on_close(self._pool.close)

    async def play_match(self, match: Match) -> Mapping[str, float]:
        """Play to the end by `await match[seat].ask(text)`, and return the reward of each seat.

        Rewards of opponents' seats may be left out.
        """
        raise EnvironmentLoadError(
            f"{class_location(type(self))} must define async play_match(self, match)"
        )

    def seat_prompt(self, seat: str, example: Example) -> str:
        """Return the system message of a seat, which must differ from those of the other seats."""
        return f"{self.system_prompt}\n\nYou play {seat}.".strip()

    @property
    def sends_system(self) -> bool:
        """True: each seat learns its name from a system message."""
        return True

    def player_of(
        self, seat: str, example: Example
    ) -> HelperModel | Literal["older-version"] | None:
        """Return the opponent that plays `seat`; None = the policy plays it."""
        if seat in self._opponents or OTHERS not in self._opponents:
            return self._opponents.get(seat)
        free = [name for name in self.seats if name not in self._opponents]
        # All rollouts of an example have the policy in the same seat, so that they are compared.
        drawn = free[zlib.crc32(example.id.encode()) % len(free)]
        return None if seat == drawn else self._opponents[OTHERS]

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Play the match, and record the conversation and the reward of each seat."""
        prompt = [one for one in episode.messages if one.role != "system" and one.content]
        seats: dict[str, Seat] = {}
        for name in self.seats:
            said = self.seat_prompt(name, episode.example)
            opening = [Message(role="system", content=said), *prompt]
            opponent = self.player_of(name, episode.example)
            if opponent == OLDER_VERSION:
                role = f"opponents.{name}"
                opponent = OlderVersion(episode.endpoint, self._pool, role=role)
            seats[name] = Seat(name, episode, opening, opponent)
        agents = {name: agent_of(seat.messages) for name, seat in seats.items()}
        if len(set(agents.values())) < len(agents):
            raise EnvironmentLoadError(
                f"{location_of(self.seat_prompt)} gives several seats the same system message, by "
                "which their answers are told apart; name the seat in it"
            )
        mine = [name for name, seat in seats.items() if seat.is_policy]
        # The first of the policy's seats stands for the rollout where one conversation is shown.
        episode.messages = seats[mine[0]].messages
        episode.conversations = tuple(seat.messages for seat in seats.values())
        method = self.play_match
        earned = await self.caller.one("play", method, Match(episode, seats))
        if not episode.turns:
            raise EnvironmentLoadError(
                f"{location_of(method)} ended the match before the policy was asked in a seat of "
                f"its own ({', '.join(mine)}), so its reward would say nothing about the policy; "
                "let a wrong first move of an opponent stand for a legal one"
            )
        for name, reward in _checked(earned, location_of(method), seats).items():
            self.check_range(reward)
            seat = seats[name]
            episode.metrics[f"seat_reward/{name}"] = reward
            if seat.is_policy and any(one.role == "assistant" for one in seat.messages):
                episode.agent_rewards[agents[name]] = reward
        episode.tags |= {f"seat/{name}": seat.player for name, seat in seats.items()}
        return StopReason.LENGTH if seats[mine[0]].was_cut else StopReason.COMPLETED

    def compute_reward(self, rollout: Rollout, example: Example) -> float:
        """Return the mean reward of the policy's seats; RewardError if the match did not end."""
        if not rollout.agent_rewards:
            raise RewardError(
                f"the match was cut short ({rollout.stop_reason}) before "
                f"{location_of(self.play_match)} said what each seat has earned; give it more time "
                "or a longer context, or catch ContextLengthError in it and judge what is there"
            )
        return math.fsum(rollout.agent_rewards.values()) / len(rollout.agent_rewards)


def _require_seats(seats: object, where: str) -> None:
    names = cast(tuple[object, ...], seats) if isinstance(seats, tuple) else ()
    are_names = all(isinstance(one, str) and one and one != OTHERS for one in names)
    if not are_names or not 2 <= len(set(names)) == len(names) <= MAX_SEATS:
        raise EnvironmentLoadError(
            f"{where}: seats must be a tuple of 2 to {MAX_SEATS} different names, such as "
            f'("white", "black"), none of them "{OTHERS}"; got {seats!r:.80}'
        )


def _checked(earned: object, where: str, seats: Mapping[str, Seat]) -> dict[str, float]:
    """Return the rewards that `play_match` returned, by seat."""
    given: Mapping[object, object] = (
        cast(Mapping[object, object], earned) if isinstance(earned, Mapping) else {}
    )
    rewards = {str(name): finite(value) for name, value in given.items()}
    for name in rewards:
        if name not in seats:
            raise unknown_name("seat", name, seats, f"(in what {where} returns)")
    missing = [
        name
        for name, seat in seats.items()
        if rewards.get(name) is None and (seat.is_policy or name in rewards)
    ]
    if missing:
        raise EnvironmentLoadError(
            f"{where} must return the reward of each seat, a finite number, such as "
            f'{{"{missing[0]}": 1.0}}, got {earned!r:.80}; it lacks {", ".join(missing)}'
        )
    return {name: value for name, value in rewards.items() if value is not None}
