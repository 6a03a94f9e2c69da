"""Which games of TextArena 0.7.4 can be played here, and why the others cannot."""

from collections.abc import Mapping, Sequence

from telescope_core.errors import ConfigError, unknown_name

GAMES: Sequence[str] = (
    "2048",
    "Bandit",
    "Blackjack",
    "Countdown",
    "Crosswords",
    "Cryptarithm",
    "FifteenPuzzle",
    "FrozenLake",
    "GuessTheNumber",
    "LightsOut",
    "LogicPuzzle",
    "Mastermind",
    "Minesweeper",
    "PegJump",
    "RushHour",
    "Secretary",
    "Slitherlink",
    "Sokoban",
    "Sudoku",
    "ThreeCardMonte",
    "TowerOfHanoi",
)
MATCHES: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "Alquerque",
            "Breakthrough",
            "Chopsticks",
            "ColonelBlotto",
            "ConnectFour",
            "GameOfPureStrategy",
            "IteratedMatchingPennies",
            "IteratedPrisonersDilemma",
            "IteratedRockPaperScissors",
            "KuhnPoker",
            "LinesOfAction",
            "Nim",
            "Othello",
            "PigDice",
            "SimpleTak",
            "TicTacToe",
            "UltimateTicTacToe",
            "WildTicTacToe",
        ),
        2,
    ),
    **dict.fromkeys(("ThreePlayerGOPS", "ThreePlayerTicTacToe"), 3),
}
"""Games for several players -> how many."""
_WORDS = "it downloads word lists when it starts"
_MODEL = "it asks another model over the network"
_SYNTAX = "its source needs Python 3.12"
REFUSED: Mapping[str, str] = {
    "Checkers": _SYNTAX,
    "Chess": _SYNTAX,
    "GuessWho": _MODEL,
    "Hangman": _WORDS,
    "IteratedStagHunt": _SYNTAX,
    "Klondike": _SYNTAX,
    "ReverseTicTacToe": _SYNTAX,
    "Set": "its score has no maximum",
    "TwentyQuestions": _MODEL,
    "WordLadder": _WORDS,
    "WordSearch": _WORDS,
    "Wordle": f"{_WORDS}; the environment `wordle` is that game",
}


def chosen_games(text: str) -> list[str]:
    """Return the games that `text` names, separated by commas; `all` = all for one player.

    They are for equally many players; `players_of` says for how many.
    """
    if text.strip() == "all":
        return list(GAMES)
    names = [part.strip().removesuffix("-v0") for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError("games names no game; write for instance games = 'Mastermind,Sudoku'")
    for name in names:
        if name in REFUSED:
            raise ConfigError(f"game {name!r} cannot be played here: {REFUSED[name]}")
        if name not in GAMES and name not in MATCHES:
            raise unknown_name("game", name, [*GAMES, *MATCHES])
    numbers = {name: players_of(name) for name in names}
    if len(set(numbers.values())) > 1:
        shown = ", ".join(f"{name} for {number}" for name, number in numbers.items())
        raise ConfigError(
            f"games must all be for equally many players, got {shown}; play them as several "
            "environments"
        )
    return list(numbers)


def players_of(name: str) -> int:
    """Return how many players a game is for."""
    return MATCHES.get(name, 1)
