"""Base classes and decorators for environment authors."""

from telescope_core.environments.base import Environment
from telescope_core.environments.calls import runs_in
from telescope_core.environments.episode import Episode
from telescope_core.environments.hooks import cleanup, setup, stop
from telescope_core.environments.mcp import McpServer
from telescope_core.environments.rewards import group_reward, metric, reward
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.environments.tool_functions import ToolError, tool
from telescope_core.environments.toolbox import ToolConfig
from telescope_core.environments.tools import ToolEnvironment
from telescope_core.environments.turns import MultiTurnEnvironment, SingleTurnEnvironment

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "McpServer",
    "MultiTurnEnvironment",
    "SingleTurnEnvironment",
    "ToolConfig",
    "ToolEnvironment",
    "ToolError",
    "cleanup",
    "group_reward",
    "metric",
    "reward",
    "runs_in",
    "setup",
    "stop",
    "tool",
]
