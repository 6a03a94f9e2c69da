"""Compares a wheel's bytes with the published size and hash; does not look inside the wheel."""

import hashlib

from telescope_core.errors import RegistryError
from telescope_envs.registry.records import Release


def check_bytes(data: bytes, release: Release) -> None:
    """Raise RegistryError unless `data` has the size and sha256 recorded in `release`."""
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != release.wheel.size or digest != release.wheel.sha256:
        raise RegistryError(
            f"wheel {release.wheel.filename} is not the one that was published: expected "
            f"{release.wheel.size} bytes, sha256 {release.wheel.sha256}, got {len(data)} bytes, "
            f"sha256 {digest}; nothing was installed. Restore the file in the registry"
        )
