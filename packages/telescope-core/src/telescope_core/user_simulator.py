"""`UserSimulator`: a model that plays the user of a conversation with the policy."""

from telescope_core.models.helper_models import (
    UserSimulator,
    UserSimulatorConfig,
)

__all__ = [
    "UserSimulator",
    "UserSimulatorConfig",
]
