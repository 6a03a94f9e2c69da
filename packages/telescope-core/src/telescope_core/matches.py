"""`MatchEnvironment`: a match of two to eight seats, each played by the policy or another model."""

from telescope_core.models.matches import (
    Match,
    MatchConfig,
    MatchEnvironment,
    OpponentConfig,
    Seat,
)

__all__ = ["Match", "MatchConfig", "MatchEnvironment", "OpponentConfig", "Seat"]
