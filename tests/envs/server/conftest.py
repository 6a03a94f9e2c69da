"""A registry server with acme/toy 0.1.0 in it, and who talks to it."""

from collections.abc import Iterator

import httpx
import pytest
from tests.envs.projects import toy_publication
from tests.envs.server.sending import Sender
from tests.envs.serving import ServedHub, served


@pytest.fixture
def hub(tmp_path) -> Iterator[ServedHub]:
    """A server that anybody may read; acme may publish, and has published toy 0.1.0."""
    with served(tmp_path / "hub") as hub:
        hub.store.publish(toy_publication())
        yield hub


@pytest.fixture
def client(hub) -> Iterator[httpx.Client]:
    """Somebody without a token."""
    with httpx.Client(base_url=hub.address) as client:
        yield client


@pytest.fixture
def acme(hub) -> Iterator[Sender]:
    """Somebody with a token of acme."""
    with Sender(hub.address, hub.token()) as sender:
        yield sender
