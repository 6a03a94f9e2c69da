"""Environments in processes of their own: the protocol, its workers and their pool."""

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
