"""Sandboxes: isolated places in which programs that a model wrote run.

`protocol` defines sandboxes; each provider is one module or folder beside it.
"""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_core.sandboxes.grading import (
        CallTest,
        Grade,
        HiddenTestOutcome,
        Returned,
        StdinTest,
        call_function,
        grade_program,
    )
    from telescope_core.sandboxes.lookup import open_provider, provider_names
    from telescope_core.sandboxes.pool import PoolUsage, SandboxPool
    from telescope_core.sandboxes.programs import ProgramConfig, ProgramEnvironment
    from telescope_core.sandboxes.protocol import (
        WORK_FOLDER,
        CommandResult,
        FileEntry,
        Limit,
        Network,
        Sandbox,
        SandboxError,
        SandboxFileError,
        SandboxLimitError,
        SandboxProvider,
        SandboxSpec,
        SandboxUnavailableError,
        StopCause,
    )
    from telescope_core.sandboxes.tools import EpisodeSandboxes

__all__ = [
    "CallTest",
    "CommandResult",
    "EpisodeSandboxes",
    "FileEntry",
    "Grade",
    "HiddenTestOutcome",
    "Limit",
    "Network",
    "PoolUsage",
    "ProgramConfig",
    "ProgramEnvironment",
    "Returned",
    "Sandbox",
    "SandboxError",
    "SandboxFileError",
    "SandboxLimitError",
    "SandboxPool",
    "SandboxProvider",
    "SandboxSpec",
    "SandboxUnavailableError",
    "StdinTest",
    "StopCause",
    "WORK_FOLDER",
    "call_function",
    "grade_program",
    "open_provider",
    "provider_names",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        ("protocol", "lookup", "pool", "grading", "tools", "programs"),
    )
