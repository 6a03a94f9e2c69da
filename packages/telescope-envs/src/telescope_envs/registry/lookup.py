"""Opens the chosen registry; there is never a fallback to another one."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.files import data_folder
from telescope_envs.records.installed import entries_of
from telescope_envs.records.release import Release
from telescope_envs.registry.config import (
    FORMS,
    Address,
    Opening,
    find_address,
    read_user_config,
    user_file,
)
from telescope_envs.registry.credentials import login_hint, token_for
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import parse_request, resolve
from telescope_envs.registry.stores import Opener, Place, Store, WritableStore
from telescope_envs.registry.stores.folder import LocalStore

GROUP = "telescope.registries"
"""Entry point group that maps an address scheme to a `place.Opener`."""


class LocatedRelease(NamedTuple):
    """A release and the registry it is in."""

    registry: Registry
    release: Release


def open_registry(text: str | None = None, opening: Opening | None = None) -> Registry:
    """Open the registry with the name or address `text`; None means the default registry."""
    opening = opening or Opening()
    return Registry(_open_store(find_address(text, opening), opening))


def open_writable(text: str | None = None, opening: Opening | None = None) -> WritableStore:
    """Open the same registry for publishing; raises RegistryError if it is read-only."""
    opening = opening or Opening()
    place = find_address(text, opening)
    store = _open_store(place, opening)
    if not isinstance(store, WritableStore):
        raise RegistryError(
            f"{place.text} is read-only; publish to the folder it is rendered from, or to a "
            "registry served with telescope hub serve"
        )
    return store


def locate_release(
    text: str, registry: str | None = None, opening: Opening | None = None
) -> LocatedRelease:
    """Return the release that a request such as `corp:acme/toy@1.0` resolves to, and its registry.

    The registry is chosen as in `open_registry_of`.
    """
    opened = open_registry_of(text, registry, opening)
    return LocatedRelease(opened, resolve(opened, text))


def open_registry_of(
    text: str, registry: str | None = None, opening: Opening | None = None
) -> Registry:
    """Open the registry that the request `text` names, else `registry`, else the default one."""
    return open_registry(registry_of(text, registry, opening), opening)


def registry_of(text: str, registry: str | None, opening: Opening | None = None) -> str | None:
    """Return the registry to open for a request; its prefix must be a configured name."""
    opening = opening or Opening()
    named = parse_request(text).registry
    if not named:
        return registry
    config = read_user_config(opening.environ)
    place = config.named(named).place
    if registry and config.place_of(registry) != place:
        raise ConfigError(
            f"{text!r} names the registry {named!r}, but --registry is {registry!r}; "
            "omit one of them"
        )
    return named


def _open_store(address: Address, opening: Opening) -> Store:
    if address.scheme == "file":
        return LocalStore(Path(address.text), download=partial(_download, address, opening))
    config = read_user_config(opening.environ)
    if address.is_plain_http and not config.allows_plain_http(address):
        raise ConfigError(
            f"{address.text} is plain http, which anyone on the network can read and change; use "
            "https, or add it to [registries] in "
            f"{user_file(opening.environ)} with insecure = true"
        )
    return _opener(address.scheme)(_place_at(address, opening))


def _place_at(address: Address, opening: Opening) -> Place:
    return Place(
        address=address,
        token=token_for(address.text, environ=opening.environ),
        login_hint=login_hint(address.text, environ=opening.environ),
        cache=data_folder() / "cache",
        offline=opening.offline,
        tell=opening.tell,
    )


def _download(
    address: Address, opening: Opening, url: str, max_bytes: int, sha256: str
) -> bytes | None:
    """Return a wheel that the registry in a folder stores elsewhere."""
    # Imported only now, because who lists or installs from a folder should not wait for it.
    web = import_module("telescope_envs.registry.stores.http")
    return web.download(_place_at(address, opening), url, max_bytes, sha256)


def _opener(scheme: str) -> Opener:
    targets = {entry.name: entry.target for entry in entries_of(GROUP)}
    if scheme not in targets:
        known = ", ".join(sorted({"file", *targets}))
        raise ConfigError(
            f"registries at {scheme}:// are not supported (supported: {known}); give {FORMS}; for "
            "a bucket, give the https:// address that serves it"
        )
    try:
        module, _, name = targets[scheme].partition(":")
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise ConfigError(
            "registries on the Hugging Face Hub need huggingface_hub, which is not installed; "
            "run: pip install 'telescope-envs[hub]'"
        ) from None
