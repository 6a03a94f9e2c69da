"""State changes of each inference server of a run: `servers.jsonl` in a run folder."""

from dataclasses import dataclass
from enum import StrEnum

from telescope_core.base.types import WeightVersion


class ServerState(StrEnum):
    """The state of a server."""

    STARTING = "starting"
    """Its process was started, and does not answer yet."""
    LOADING = "loading"
    """It answers, and waits for the current weights."""
    SERVING = "serving"
    """It samples."""
    UPDATING = "updating"
    """It is paused while it receives new weights; requests wait in its queue."""
    LOST = "lost"
    """It has died, hangs, or holds weights other than those that were sent."""
    GIVEN_UP = "given up"
    """It was lost too often, and is not started again."""


class ServerRole(StrEnum):
    """The purpose of a server."""

    ROLLOUT = "rollout"
    """It samples rollouts for training, and evals too if no other server does."""
    OPPONENT = "opponent"
    """It holds an older version of the policy, which plays against the present one."""
    EVAL = "eval"
    """It samples evals only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """The start of a state of a server."""

    time_s: float
    """Seconds since 1970, UTC."""
    server: str
    """Its address."""
    role: ServerRole
    life: int
    """Number of its start: 1 for the first, and one more after each loss."""
    state: ServerState
    version: WeightVersion
    """The weights that it holds, or held when it was lost."""
    identity: str = ""
    """Identity of this life of the server, unique over all runs; its log begins with it. Requests
    name it, and only this life answers them."""
    reason: str = ""
    """For `lost` and `given up`: why. For `starting`: what the life before ended with, which may
    be known more exactly by then."""
