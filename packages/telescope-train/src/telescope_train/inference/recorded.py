"""An environment whose rollouts carry the turns that the policy itself recorded."""

from dataclasses import replace
from typing import Any

from telescope_core.protocols import EnvironmentClient, PlayRequest, Policy
from telescope_core.types import Rollout, RolloutStatus, StopReason
from telescope_train.inference.policy import TokenPolicy


class RecordedEnvironment:
    """Wraps `play` of any environment client; every other call goes straight to the client."""

    def __init__(self, client: EnvironmentClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play `request`; the endpoint of a token policy ends with the rollout."""
        if not isinstance(policy, TokenPolicy):
            return await self._client.play(request, policy)
        try:
            rollout = await self._client.play(request, policy)
        finally:
            policy.close()
        return as_recorded(rollout, policy)


def as_recorded(rollout: Rollout, policy: TokenPolicy) -> Rollout:
    """Return `rollout` with the turns of `policy`, as failed if a server did not answer.

    A program may swallow the error and go on, but its reward then says nothing about the policy.
    """
    rollout = replace(rollout, turns=tuple(policy.turns))
    is_over = rollout.status in (RolloutStatus.KEPT, RolloutStatus.FAILED)
    if policy.failure is None or not is_over or rollout.stop_reason is StopReason.TIMEOUT:
        return rollout
    return replace(
        rollout,
        status=RolloutStatus.FAILED,
        status_reason=type(policy.failure).__name__,
        stop_reason=StopReason.ERROR,
        error=f"{type(policy.failure).__name__}: {policy.failure}",
        reward=None,
    )
