"""The gateway: an OpenAI chat endpoint for each rollout, in front of the policy of the rollout."""

from telescope_core.gateway.policies import ForwardingPolicies, RecordingPolicy, forwarding
from telescope_core.gateway.recorded import RecordedEnvironment, canceled_attempt, recording
from telescope_core.gateway.server import Gateway
from telescope_core.gateway.session import Session

__all__ = [
    "ForwardingPolicies",
    "Gateway",
    "RecordedEnvironment",
    "RecordingPolicy",
    "Session",
    "canceled_attempt",
    "forwarding",
    "recording",
]
