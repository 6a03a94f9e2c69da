"""`TextGames`: the policy plays a game of TextArena; the reward is its final score.

A game for several players is a `TextMatch`, of which each player is a seat.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from telescope_core import (
    Environment,
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Split,
    SplitSource,
    StopReason,
    metric,
    reward,
)
from telescope_core.errors import ConfigError
from telescope_core.matches import Match, MatchConfig, MatchEnvironment
from telescope_core.parsers import without_thinking
from telescope_env_telescope_text_games.names import chosen_games, players_of
from telescope_env_telescope_text_games.play import Outcome, SeededGame
from telescope_env_telescope_text_games.solutions import solution

_MAX_SEED = 2**31 - 1
_MAX_MOVE = 2000


class GamesConfig(MatchConfig):
    """Which games are played, how long, and against whom."""

    games: str = "GuessTheNumber,Mastermind"
    """Names of games for equally many players, separated by commas; `all` = all for one."""
    max_turns: Annotated[int, Field(ge=1, le=500)] = 50
    """Most turns of a game, of all players together, besides the limit that it has itself."""
    seed: int = 0
    """Which boards are drawn."""


class TextGames(Environment):
    """Play games in text: those for one player, or, by `games`, those for several."""

    Config = GamesConfig
    config: GamesConfig

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._games = chosen_games(self.config.games)
        if players_of(self._games[0]) > 1:
            raise ConfigError(
                f"{self._games[0]} is for several players; build it with TextGames.from_settings"
            )
        if self.config.opponents:
            raise ConfigError(
                f"opponents are set, and {self._games[0]} is for one player; name games for "
                "several in env.games"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Environment:
        """Build the environment of these games: a match if they are for several players."""
        games = settings.get("games", "")
        if isinstance(games, str) and games:
            match = _MATCHES.get(players_of(chosen_games(games)[0]))
            if match is not None:
                return match.from_settings(settings)
        return super().from_settings(settings)

    @property
    def goes_on(self) -> bool:
        """Whether there is another turn."""
        return self.config.max_turns > 1

    def examples(self, split: Split) -> ExampleSource:
        """Return endless boards of the games; a hash of game and seed decides the split."""
        return SplitSource(self._draw, split=split, seed=f"text-games/{self.config.seed}")

    def _draw(self, rng: random.Random) -> Example:
        name, seed = rng.choice(self._games), rng.randint(0, _MAX_SEED)
        game = SeededGame(name, seed)
        prompt = game.told()
        ended = game.move(prompt)
        if ended is not None and ended.scores[0] > 0.0 and not ended.broke_rules[0]:
            return self._draw(rng)  # the moves that the rules give as examples must not win
        return Example(id=f"{name}/{seed}", prompt=prompt, info={"game": name, "seed": seed})

    def gold_answer(self, example: Example) -> Sequence[str] | None:
        """Return moves that win, for the games that have a solver here."""
        return solution(*_board(example))

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Pass moves to the game and what it says to the policy, until it ends."""
        name, seed = _board(episode.example)
        game: Any = await self.caller.one("play", SeededGame, name, seed)
        await self.caller.one("play", game.told)
        episode.tags["game"] = name
        for turn in range(self.config.max_turns):
            completion = await episode.generate()
            if completion.finish_reason == "length":
                return StopReason.LENGTH
            said = without_thinking(completion.message.content)[-_MAX_MOVE:]
            ended: object = await self.caller.one("play", game.move, said)
            if ended is not None:
                episode.state["outcome"] = ended
                return StopReason.COMPLETED
            told = await self.caller.one("play", game.told)
            if turn + 1 < self.config.max_turns:
                episode.add(str(told) or "Go on.")
        return StopReason.MAX_TURNS

    @reward
    def final_score(self, episode: Episode[Any]) -> float:
        """The final score; 0 for a game that did not end, or ended with moves against its rules."""
        ended: Outcome | None = episode.state.get("outcome")
        if ended is None or ended.broke_rules[0]:
            return 0.0
        return min(1.0, max(0.0, ended.scores[0]))

    @metric(low=0, high=1)
    def broke_rules(self, episode: Episode[Any]) -> float:
        """1 when the game ended because moves broke its rules."""
        ended: Outcome | None = episode.state.get("outcome")
        return float(ended is not None and ended.broke_rules[0])

    @metric(low=0)
    def moves(self, episode: Episode[Any]) -> float:
        """How many turns were taken."""
        return float(len(episode.turns))


class TextMatch(MatchEnvironment):
    """A game for two players."""

    Config = GamesConfig
    config: GamesConfig
    seats = ("player-0", "player-1")

    def examples(self, split: Split) -> ExampleSource:
        """Return endless boards of the games; a hash of game and seed decides the split."""
        games = chosen_games(self.config.games)

        def draw(rng: random.Random) -> Example:
            name, seed = rng.choice(games), rng.randint(0, _MAX_SEED)
            return Example(id=f"{name}/{seed}", prompt="", info={"game": name, "seed": seed})

        return SplitSource(draw, split=split, seed=f"text-games/{self.config.seed}")

    async def play_match(self, match: Match) -> dict[str, float]:
        """Let the players answer what they are told; a game that does not end is a draw."""
        name, seed = _board(match.example)
        game: Any = await self.caller.one("play", SeededGame, name, seed)
        match.episode.tags["game"] = name
        for _ in range(self.config.max_turns):
            told = str(await self.caller.one("play", game.told))
            said = await match[f"player-{game.player}"].ask(told or "Go on.")
            ended: Any = await self.caller.one(
                "play", game.move, without_thinking(said)[-_MAX_MOVE:]
            )
            if ended is not None:
                match.episode.state["outcome"] = ended
                shares = (min(1.0, max(0.0, (one + 1) / 2)) for one in ended.scores)
                return dict(zip(self.seats, shares, strict=True))
        return dict.fromkeys(self.seats, 0.5)

    @metric(low=0, high=1)
    def broke_rules(self, episode: Episode[Any]) -> float:
        """1 when the game ended because moves of a seat of the policy broke its rules."""
        ended: Outcome | None = episode.state.get("outcome")
        broken = zip(self.seats, () if ended is None else ended.broke_rules, strict=False)
        mine = [is_so for seat, is_so in broken if episode.tags[f"seat/{seat}"] == "policy"]
        return float(any(mine))

    @metric(low=0)
    def moves(self, episode: Episode[Any]) -> float:
        """How many turns the policy took, in all of its seats."""
        return float(len(episode.turns))


class TextMatchOfThree(TextMatch):
    """A game for three players."""

    seats = ("player-0", "player-1", "player-2")


_MATCHES = {len(one.seats): one for one in (TextMatch, TextMatchOfThree)}


def _board(example: Example) -> tuple[str, int]:
    name, seed = example.info["game"], example.info["seed"]
    assert isinstance(name, str), f"game of example {example.id}"
    assert isinstance(seed, int), f"seed of example {example.id}"
    return name, seed
