"""The gateway: an endpoint for each rollout, as OpenAI's and Anthropic's clients expect it."""

from telescope_core.gateway.policies import (
    ForwardingPolicies,
    RecordedEnvironment,
    RecordingPolicy,
    canceled_attempt,
    forwarding,
    recording,
)
from telescope_core.gateway.server import Gateway, Session

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
