"""Telescope core: types, environments and rollouts.

Importing it never imports torch, transformers or datasets.
"""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_core.base.errors import ConfigError, TelescopeError
    from telescope_core.base.images import message_of, read_image
    from telescope_core.base.protocols import ExampleSource, Policy
    from telescope_core.base.types import (
        ChatEndpoint,
        Completion,
        Example,
        Group,
        Image,
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
    from telescope_core.environments import (
        Environment,
        EnvironmentConfig,
        Episode,
        McpServer,
        MultiTurnEnvironment,
        SingleTurnEnvironment,
        ToolConfig,
        ToolEnvironment,
        ToolError,
        cleanup,
        group_reward,
        metric,
        reward,
        runs_in,
        setup,
        stop,
        tool,
    )
    from telescope_core.examples import GeneratedSource, ListSource, SplitSource

__all__ = [
    "ChatEndpoint",
    "Completion",
    "ConfigError",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "Example",
    "ExampleSource",
    "GeneratedSource",
    "Group",
    "Image",
    "ListSource",
    "Message",
    "McpServer",
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
    "ToolConfig",
    "ToolEnvironment",
    "ToolError",
    "Turn",
    "WeightVersion",
    "cleanup",
    "group_reward",
    "message_of",
    "metric",
    "read_image",
    "reward",
    "runs_in",
    "setup",
    "stop",
    "tool",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            *("base.errors", "base.types", "base.images", "examples", "base.protocols"),
            "environments",
        ),
    )
