"""The environments that are installed for this interpreter, and the releases they came from.

Each installation leaves one small JSON file in the data folder. A file whose package is gone is
ignored.
"""

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_envs.inventory import id_of, is_there, record_paths, records_folder, unrecorded
from telescope_envs.lockfile import LockedEnvironment
from telescope_envs.registry.records import Release

FORMAT_VERSION = 1


class Installation(BaseModel):
    """The record that `env install` writes."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    format: int = FORMAT_VERSION
    registry: str
    """Its address, in the form that `--registry` accepts."""
    installed_at: datetime
    release: Release
    interpreter: str = ""
    """Python of its own virtual environment; empty if it shares this record's interpreter."""
    locked: LockedEnvironment | None = None
    """Its lock entry; None if it shares the interpreter that this record belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEnvironment:
    """One environment that this interpreter can import."""

    id: str
    """`owner/name`, or the bare name if the owner of a package is not known."""
    name: str
    version: str
    distribution: str
    factory: str
    interpreter: str
    """The Python that can import it."""
    installation: Installation | None
    """None if it was installed by other means, such as an editable install."""

    @property
    def sha256(self) -> str:
        """sha256 of the wheel it was installed from; empty if it did not come from a registry."""
        return self.installation.release.wheel.sha256 if self.installation is not None else ""


def installed_environments() -> list[InstalledEnvironment]:
    """Return every environment this interpreter can import, by id."""
    recorded = {found.distribution: found for found in _recorded()}
    found = list(recorded.values())
    for entry in unrecorded(set(recorded)):
        found.append(
            InstalledEnvironment(
                id=id_of(entry),
                name=entry.name,
                version=entry.distribution.version,
                distribution=entry.distribution.name,
                factory=entry.target,
                interpreter=sys.executable,
                installation=None,
            )
        )
    return sorted(found, key=lambda environment: environment.id)


def write_record(installation: Installation) -> None:
    """Write the record of an installation atomically."""
    path = _record_path(installation.release)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_text(installation.model_dump_json(by_alias=True, indent=2))
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def remove_record(release: Release) -> None:
    """Remove the record of an installation, if there is one."""
    _record_path(release).unlink(missing_ok=True)


def _record_path(release: Release) -> Path:
    return records_folder() / release.owner / f"{release.name}.json"


def _recorded() -> list[InstalledEnvironment]:
    found: list[InstalledEnvironment] = []
    for path in record_paths():
        try:
            installation = Installation.model_validate_json(path.read_bytes())
        except ValidationError:
            continue
        release = installation.release
        if is_there(release.distribution, release.version, installation.interpreter):
            found.append(
                InstalledEnvironment(
                    id=release.id,
                    name=release.name,
                    version=release.version,
                    distribution=release.distribution,
                    factory=release.factory,
                    interpreter=installation.interpreter or sys.executable,
                    installation=installation,
                )
            )
    return found
