"""`MatchEnvironment`: a match of two to eight seats, each played by the policy or another model.

Every seat has a conversation of its own and its own reward, so the policy may play several seats
of one match: each is then compared with the same seat in the other rollouts of the example.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from pydantic import Field

from telescope_core.base.agents import agent_of
from telescope_core.base.code_places import location_of
from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    RewardError,
    unknown_name,
)
from telescope_core.base.types import Example, Message, Rollout, StopReason
from telescope_core.environments.base import Environment
from telescope_core.environments.class_checks import class_location
from telescope_core.environments.episode import Episode
from telescope_core.environments.outcomes import finite
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.models.helper_models import HelperModel, HelperModelConfig

OTHERS = "others"
"""In the setting `opponents`, every seat but one."""
MAX_SEATS = 8


class OpponentConfig(HelperModelConfig):
    """Settings of a model that plays against the policy."""

    temperature: float = 1.0


class MatchConfig(EnvironmentConfig):
    """Settings of a match: who plays against the policy."""

    opponents: dict[str, OpponentConfig] = Field(default_factory=dict[str, OpponentConfig])
    """Models at endpoints, by the seat that each plays; the policy plays the seats that are left.
    `others` = all seats but one, which is another one from example to example. Without any, the
    policy plays every seat, against itself."""


class Seat:
    """One player of a match: a name, what was said to it and by it, and who answers."""

    def __init__(
        self, name: str, episode: Episode[Any], opening: list[Message], opponent: HelperModel | None
    ) -> None:
        """`opponent`: None = the policy plays here."""
        self.name = name
        self.messages = opening
        self.was_cut = False
        """Whether the latest answer was cut at `max_tokens`; not known of an opponent's."""
        self._episode = episode
        self._opponent = opponent

    @property
    def is_policy(self) -> bool:
        """Whether the policy plays here, which is then trained on these answers."""
        return self._opponent is None

    async def ask(self, text: str) -> str:
        """Tell the seat `text`, and return its answer, which is also appended to `messages`."""
        last = self.messages[-1]
        if last.role == "user":
            # Chat templates of some models refuse two messages of the user in a row.
            self.messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
        else:
            self.messages.append(Message(role="user", content=text))
        if self._opponent is None:
            completion = await self._episode.generate(messages=self.messages)
            self.was_cut = completion.finish_reason == "length"
            return completion.message.content
        answer = await self._opponent.ask(self.messages, str, wanted="your move")
        self.messages.append(Message(role="assistant", content=answer))
        return answer


class Match:
    """One match that is being played. `match["x"]` is the seat with that name."""

    def __init__(self, episode: Episode[Any], seats: Mapping[str, Seat]) -> None:
        self.episode = episode
        self.seats = seats

    @property
    def example(self) -> Example:
        """The example that is played."""
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
        self._opponents = {
            name: HelperModel(one, self, role=f"opponents.{name}")
            for name, one in opponents.items()
        }

    async def play_match(self, match: Match) -> Mapping[str, float]:
        """Play to the end by `await match[seat].ask(text)`, and return the reward of each seat.

        Rewards of opponents' seats may be left out.
        """
        raise EnvironmentLoadError(
            f"{class_location(type(self))} must define async play_match(self, match)"
        )

    def seat_prompt(self, seat: str, example: Example) -> str:
        """Return the system message of a seat; no two seats may have the same."""
        return f"{self.system_prompt}\n\nYou play {seat}.".strip()

    @property
    def sends_system(self) -> bool:
        """True: each seat is told its name."""
        return True

    def player_of(self, seat: str, example: Example) -> HelperModel | None:
        """Return the opponent that plays `seat`; None = the policy plays it."""
        if seat in self._opponents or OTHERS not in self._opponents:
            return self._opponents.get(seat)
        free = [name for name in self.seats if name not in self._opponents]
        # All rollouts of an example have the policy in the same seat, so that they are compared.
        drawn = free[zlib.crc32(example.id.encode()) % len(free)]
        return None if seat == drawn else self._opponents[OTHERS]

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Play the match, and keep what each seat said and earned."""
        prompt = [one for one in episode.messages if one.role != "system" and one.content]
        seats: dict[str, Seat] = {}
        for name in self.seats:
            said = self.seat_prompt(name, episode.example)
            opening = [Message(role="system", content=said), *prompt]
            seats[name] = Seat(name, episode, opening, self.player_of(name, episode.example))
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
        episode.tags |= {
            f"seat/{name}": "policy" if seat.is_policy else "opponent"
            for name, seat in seats.items()
        }
        return StopReason.LENGTH if seats[mine[0]].was_cut else StopReason.COMPLETED

    def compute_reward(self, rollout: Rollout, example: Example) -> float:
        """Return the mean reward of the policy's seats; raises RewardError if there was no end."""
        if not rollout.agent_rewards:
            raise RewardError(
                f"the match was cut short ({rollout.stop_reason}) before "
                f"{location_of(self.play_match)} said what each seat has earned; give it more time "
                "or a longer context, or catch ContextLengthError in it and judge what is there"
            )
        return sum(rollout.agent_rewards.values()) / len(rollout.agent_rewards)


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
