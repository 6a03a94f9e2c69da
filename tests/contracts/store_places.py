"""The places that hold a registry, for the contract of stores: a new kind is one line of a table.

Each gets a folder with the files of a registry and makes a place that serves the same files. It
yields a function that opens one more store there, as another client would.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.envs.loopback_hub import loopback_hub, own_hub_settings
from tests.envs.serving import fill, served
from tests.envs.static_host import open_store, place_at, static_host

from telescope_envs.records.catalog import write_catalog
from telescope_envs.registry.stores import (
    Store,
    WritableStore,
)
from telescope_envs.registry.stores.folder import LocalStore
from telescope_envs.registry.stores.http import (
    HttpStore,
    ServedStore,
    open_http,
)
from telescope_envs.registry.stores.huggingface import HuggingFaceStore
from telescope_envs.server.auth import Scope

Place = Callable[[Path], AbstractContextManager[Callable[[], Store]]]
WritablePlace = Callable[[Path], AbstractContextManager[Callable[[], WritableStore]]]


@contextmanager
def local(folder: Path) -> Iterator[Callable[[], LocalStore]]:
    yield lambda: LocalStore(folder)


@contextmanager
def server(folder: Path) -> Iterator[Callable[[], ServedStore]]:
    """A server that is found by the `api` in its config.json, read through the cache."""
    with served(folder.parent / "hub") as hub:
        fill(hub.store, folder)
        secret = hub.token(Scope.ADMIN)
        place = place_at(hub.address, folder.parent / "cache", token=secret)
        yield lambda: open_http(place)


@contextmanager
def huggingface(folder: Path) -> Iterator[Callable[[], HuggingFaceStore]]:
    with own_hub_settings(folder.parent), loopback_hub() as hub:
        hub.upload("acme/envs", folder)
        place = place_at("hf://acme/envs", folder.parent / "cache", token=hub.token)
        yield lambda: HuggingFaceStore(place, endpoint=hub.address)


@contextmanager
def static(folder: Path) -> Iterator[Callable[[], HttpStore]]:
    """A rendered registry on a host of files."""
    (folder / "v1").mkdir()
    (folder / "v1/index.json").write_bytes(write_catalog(LocalStore(folder).catalog()))
    with static_host(folder) as host:
        yield lambda: open_store(host.address, folder.parent / "cache")


WRITABLE: dict[str, WritablePlace] = {
    "local": local,
    "server": server,
    "huggingface": huggingface,
}
"""Kind -> place that can be published to."""

READABLE: dict[str, Place] = {
    **WRITABLE,
    "static": static,
}
"""Kind -> place that can be read, those above among them."""
