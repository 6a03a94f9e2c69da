"""The gateway: an endpoint for each rollout, as OpenAI's and Anthropic's clients expect it."""

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
