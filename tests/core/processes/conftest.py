"""Pools over a wire in this process, and over real worker processes."""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "toys"))  # workers look where their host does
from wire_cases import WireInThisProcess

from telescope_core.open import open_environment
from telescope_core.processes import EnvironmentPool, Isolation, ProcessSettings
from telescope_core.processes.handshake import Identity


@pytest.fixture
async def wire() -> AsyncIterator[Callable[..., EnvironmentPool]]:
    """Return a function that opens a toy over a wire in this process."""
    opened = []

    def open_toy(name: str = "Echo", place=None, identity=None, **changes) -> EnvironmentPool:
        place = place or WireInThisProcess(f"worker_toys:{name}")
        processes = ProcessSettings(**{"max_restarts": 1, **changes})
        identity = identity or Identity(name="toy", version="1")
        opened.append(EnvironmentPool("toy", [place], {}, identity=identity, processes=processes))
        return opened[-1]

    yield open_toy
    for pool in opened:
        await pool.close()


@pytest.fixture
async def workers() -> AsyncIterator[Callable[..., EnvironmentPool]]:
    """Return a function that opens a toy in worker processes."""
    opened = []

    def open_toy(name: str = "Echo", *, settings=None, **changes) -> EnvironmentPool:
        fields = {"isolation": Isolation.PROCESS, **changes}
        opened.append(open_environment(f"worker_toys:{name}", settings, ProcessSettings(**fields)))
        return opened[-1]

    yield open_toy
    for pool in opened:
        await pool.close()
