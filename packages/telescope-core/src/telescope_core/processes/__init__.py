"""Environments in separate processes: the protocol, its workers and their pool.

Names are imported when they are first used, because a worker does not need the pool.
"""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_core.processes.launch import LocalPlace, RemotePlace
    from telescope_core.processes.pool import EnvironmentPool
    from telescope_core.processes.settings import (
        TOKEN_VARIABLE,
        Isolation,
        ProcessSettings,
        StageDeadlines,
    )

__all__ = [
    "TOKEN_VARIABLE",
    "EnvironmentPool",
    "Isolation",
    "LocalPlace",
    "ProcessSettings",
    "RemotePlace",
    "StageDeadlines",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, ("settings", "launch", "pool"))
