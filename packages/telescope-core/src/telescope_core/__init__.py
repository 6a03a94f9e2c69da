"""Telescope core: types, environments, rollouts. Imports no torch, transformers or datasets."""

from telescope_core.environments import (
    Environment,
    EnvironmentConfig,
    Episode,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    ToolEnvironment,
    ToolError,
    group_reward,
    metric,
    reward,
)
from telescope_core.errors import ConfigError, TelescopeError
from telescope_core.examples import GeneratedSource, ListSource, SplitSource
from telescope_core.protocols import ExampleSource, Policy
from telescope_core.types import (
    Completion,
    Example,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    StopReason,
    ToolCall,
    Turn,
    WeightVersion,
)

__all__ = [
    "Completion",
    "ConfigError",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "Example",
    "ExampleSource",
    "GeneratedSource",
    "Group",
    "ListSource",
    "Message",
    "MultiTurnEnvironment",
    "Policy",
    "Rollout",
    "RolloutStatus",
    "Sampling",
    "SingleTurnEnvironment",
    "Split",
    "SplitSource",
    "StopReason",
    "TelescopeError",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "Turn",
    "WeightVersion",
    "group_reward",
    "metric",
    "reward",
]
