"""Text games: games of TextArena for one to three players."""

from telescope_env_telescope_text_games.environment import TextGames

__all__ = ["TextGames"]
