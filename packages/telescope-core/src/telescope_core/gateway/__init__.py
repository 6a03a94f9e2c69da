"""The gateway: an endpoint for each rollout, as OpenAI's and Anthropic's clients expect it."""

from telescope_core.gateway.gateway import Gateway, Session
from telescope_core.gateway.policies import (
    ForwardingPolicies,
    RecordedEnvironment,
    RecordingPolicy,
    canceled_attempt,
    forwarding,
    recording,
)

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
