"""An environment whose rollouts hold the record that the policy made itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from telescope_core.base.attempts import as_failed, is_too_long
from telescope_core.base.errors import EndpointLostError, EnvironmentLoadError
from telescope_core.base.protocols import EnvironmentClient, PlayRequest, Policy
from telescope_core.base.types import Rollout, RolloutStatus, StopReason
from telescope_core.gateway.policies import RecordingPolicy


class RecordedEnvironment:
    """Wraps `play` of any environment client; other calls go straight to the client."""

    def __init__(
        self, client: EnvironmentClient, *, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`note` is called once with each remark for the author of the environment."""
        self._client = client
        self._note = note
        self._has_noted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play `request`; the endpoint of a recording policy closes with the rollout."""
        if not isinstance(policy, RecordingPolicy):
            return await self._client.play(request, policy)
        try:
            rollout = await self._client.play(request, policy)
        finally:
            policy.close()
        if policy.recorder.leaves_out_thinking and not self._has_noted:
            self._has_noted = True
            self._note(
                f"{self._client.name}: its program leaves out the thinking of earlier turns "
                "(reasoning_content), so in training each later turn is a sample of its own; see "
                "docs/how-to/bring-an-agent.md"
            )
        return as_recorded(rollout, policy)


def recording(
    client: EnvironmentClient, *, note: Callable[[str], None] = lambda text: None
) -> EnvironmentClient:
    """Return `client` as an environment whose rollouts hold the record of their policies."""
    # It has every method of the protocol, though most of them by `__getattr__`.
    return cast(EnvironmentClient, RecordedEnvironment(client, note=note))


def as_recorded(rollout: Rollout, policy: RecordingPolicy) -> Rollout:
    """Return `rollout` with the record of `policy`; failed if the model did not answer.

    A program may swallow the error and go on, but its reward then says nothing about the policy.
    """
    recorder = policy.recorder
    rollout = replace(
        rollout,
        turns=tuple(policy.turns),
        conversations=recorder.conversations or rollout.conversations,
    )
    if rollout.stop_reason is StopReason.TIMEOUT:
        return _timed_out(rollout, policy)
    is_over = rollout.status in (RolloutStatus.KEPT, RolloutStatus.FAILED)
    if not is_over:
        return rollout
    if recorder.failure is not None:
        name = type(recorder.failure).__name__
        is_full = is_too_long(recorder.failure)
        reason = StopReason.CONTEXT_LENGTH if is_full else StopReason.ERROR
        return as_failed(rollout, f"{name}: {recorder.failure}", reason)
    if recorder.is_out_of_context and rollout.tags.get("failed_in") != "reward":
        # A program that ends, or breaks, when it is told that its history is too long.
        return replace(rollout, stop_reason=StopReason.CONTEXT_LENGTH)
    if rollout.status is RolloutStatus.KEPT and not rollout.turns:
        text = (
            "its program ended without an answer of the model, so its reward would say nothing "
            "about the model; see that the program uses episode.endpoint, and what it printed"
        )
        return as_failed(rollout, f"{EnvironmentLoadError.__name__}: {text}")
    return rollout


def canceled_attempt(
    name: str, request: PlayRequest, policy: Policy | None, *, attempt: int
) -> Rollout:
    """Return the rollout of a canceled attempt: with the turns so far, if they are kept.

    `policy`: None = it was canceled before it had one.
    """
    is_recorded = isinstance(policy, RecordingPolicy)
    return replace(
        request.rollout(name),
        attempt=attempt,
        turns=tuple(policy.turns) if is_recorded else (),
        conversations=policy.recorder.conversations if is_recorded else (),
        status=RolloutStatus.CANCELLED,
        status_reason="cancelled",
        stop_reason=StopReason.CANCELLED,
    )


def _timed_out(rollout: Rollout, policy: RecordingPolicy) -> Rollout:
    """Return a rollout that reached its deadline; failed if a missing answer may be the reason."""
    recorder = policy.recorder
    if isinstance(recorder.failure, EndpointLostError):
        # No limit of the rollout's, so it is to be played again.
        error = f"{EndpointLostError.__name__}: {recorder.failure}"
        return as_failed(rollout, error)
    why = ""
    if not recorder.was_asked:
        why = " before it asked the model for anything"
    elif recorder.failure is not None:
        why = f" after a request to the model had failed: {recorder.failure}"
    if rollout.status is RolloutStatus.KEPT and (why or policy.trouble):
        error = f"TimeoutError: the rollout exceeded its deadline{why}"
        rollout = as_failed(rollout, error, StopReason.TIMEOUT)
    error, trouble = rollout.error, policy.trouble
    if error is None or not trouble or trouble in error:
        return rollout
    return replace(rollout, error=f"{error}, while the model's endpoint was in trouble: {trouble}")
