"""Computes a project's next version and writes it into pyproject.toml.

Only `write_version` has side effects. Versions follow PEP 440.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import tomlkit
from packaging.version import Version
from tomlkit.exceptions import TOMLKitError

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.names import check_version

PARTS = ("major", "minor", "patch")


def bumped(current: str, bump: str) -> str:
    """Return the version after `current`; `bump` is major, minor, patch or a version.

    A pre-release that prepares the requested step leads to its final release: patch of 1.0.1rc1 is
    1.0.1, and major is 2.0.0. A post-release leads to the next number; an epoch is kept.
    """
    if bump not in PARTS:
        return check_version(_canonical(bump))
    try:
        version = Version(current)
    except ValueError:
        raise ConfigError(
            f"the version {current[:80]!r} in pyproject.toml cannot be raised, because it is not a "
            "PEP 440 version; write for instance 0.1.0"
        ) from None
    numbers = [*version.release, 0, 0][:3]
    index = PARTS.index(bump)
    is_prepared = version.is_prerelease and not any(numbers[index + 1 :])
    if not is_prepared:
        numbers[index] += 1
        numbers[index + 1 :] = [0] * (2 - index)
    epoch = f"{version.epoch}!" if version.epoch else ""
    return f"{epoch}{'.'.join(str(number) for number in numbers)}"


def require_above(version: str, published: Iterable[str], environment_id: str) -> None:
    """Raise RegistryError unless `version` is above every published version."""
    newest = max(published, key=Version, default=None)
    if newest is not None and Version(version) <= Version(newest):
        raise RegistryError(
            f"{environment_id} {version} is not above {newest}, the newest published version; "
            "raise it with telescope env push --bump patch"
        )


def with_version(text: str, version: str, where: str = "pyproject.toml") -> str:
    """Return the TOML `text` with a new `project.version`; all other bytes stay the same."""
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    project = cast("dict[str, Any] | None", document.get("project"))
    if project is None or not isinstance(project.get("version"), str):
        raise ConfigError(
            f"{where} has no project.version that could be raised; write it there as a string "
            "(a dynamic version must be raised where it is defined)"
        )
    project["version"] = version
    return tomlkit.dumps(document)


def write_version(pyproject: Path, version: str) -> None:
    """Write `version` into `pyproject`; line endings stay as they are."""
    text = pyproject.read_bytes().decode()
    pyproject.write_bytes(with_version(text, version, str(pyproject)).encode())


def _canonical(text: str) -> str:
    try:
        return str(Version(text))
    except ValueError:
        raise ConfigError(
            f"--bump {text!r}: expected {', '.join(PARTS)} or a version such as 0.2.0 or 1.0.0rc1"
        ) from None
