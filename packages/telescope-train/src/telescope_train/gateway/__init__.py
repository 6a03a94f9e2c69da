"""The policy gateway: the model in training behind an OpenAI chat endpoint, one per rollout."""

from telescope_train.gateway.server import Gateway
from telescope_train.gateway.session import Session

__all__ = ["Gateway", "Session"]
