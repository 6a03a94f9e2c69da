"""Harnesses: known agent programs that run in sandboxes and are trained through the gateway.

`protocol` defines harnesses; each is one module here and one entry point.
"""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_core.harnesses.command import CommandHarness
    from telescope_core.harnesses.environment import AgentConfig, AgentEnvironment, AgentPlace
    from telescope_core.harnesses.installed import harness_names, open_harness
    from telescope_core.harnesses.protocol import AgentProgram, AgentTask, Harness

__all__ = [
    "AgentConfig",
    "AgentEnvironment",
    "AgentPlace",
    "AgentProgram",
    "AgentTask",
    "CommandHarness",
    "Harness",
    "harness_names",
    "open_harness",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, ("protocol", "installed", "command", "environment"))
