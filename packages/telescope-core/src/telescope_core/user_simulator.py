"""`UserSimulator`: a model that plays the user of a conversation with the policy."""

from telescope_core.models.user_simulator import (
    UserSimulator,
    UserSimulatorConfig,
)

__all__ = [
    "UserSimulator",
    "UserSimulatorConfig",
]
