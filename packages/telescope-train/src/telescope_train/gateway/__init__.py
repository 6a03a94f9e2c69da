"""The policy gateway: an OpenAI chat endpoint for each rollout, served by the model in training."""

from telescope_train.gateway.server import Gateway
from telescope_train.gateway.session import Session

__all__ = ["Gateway", "Session"]
