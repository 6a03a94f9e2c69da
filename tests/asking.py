"""What tests ask environments for, where the particulars do not matter."""

from dataclasses import replace
from typing import Any

from telescope_core import Rollout, RolloutStatus, Sampling, Split
from telescope_core.errors import EnvironmentProcessError
from telescope_core.protocols import PlayRequest


def ask(**particulars: Any) -> PlayRequest:
    """Ask for one rollout: of the first example of the train split unless told otherwise."""
    usual = {
        "split": Split.TRAIN,
        "example_index": 0,
        "group_id": "g",
        "index": 0,
        "sampling": Sampling(max_tokens=8),
        "deadline_s": 10.0,
    }
    return PlayRequest(**{**usual, **particulars})


def lost_rollout(request: PlayRequest) -> Rollout:
    """What becomes of `request` when the process that plays it dies."""
    return replace(
        request.rollout("echo"),
        status=RolloutStatus.FAILED,
        status_reason=EnvironmentProcessError.__name__,
        error=f"{EnvironmentProcessError.__name__}: a worker died",
    )
