"""A policy that answers from a script, for tests and for trying out an environment."""

from telescope_core.base.scripted import (
    Reply,
    ScriptedClient,
)

__all__ = [
    "Reply",
    "ScriptedClient",
]
