"""One local provider for the tests of a file: its template takes longer to make than most tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from telescope_core.sandboxes import Sandbox, SandboxSpec
from telescope_core.sandboxes.local.provider import LocalProvider


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that share the provider in the loop that it lives in."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[LocalProvider]:
    """A provider that no test closes or breaks."""
    made = LocalProvider()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(shared: LocalProvider) -> AsyncIterator[Sandbox]:
    """A sandbox of its own for each test."""
    made = await shared.create(SandboxSpec(memory_mb=128))
    yield made
    await made.close()
