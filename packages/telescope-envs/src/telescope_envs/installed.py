"""What is installed for this interpreter, and from which release.

Each installation leaves one small JSON file in the data folder. A file whose package has gone
counts for nothing.
"""

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_envs.home import data_folder
from telescope_envs.lockfile import LockedEnvironment
from telescope_envs.registry.names import ENTRY_POINT_GROUP
from telescope_envs.registry.records import Release

FORMAT_VERSION = 1


class Installation(BaseModel):
    """The record that `env install` leaves."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    format: int = FORMAT_VERSION
    registry: str
    """As `--registry` takes it."""
    installed_at: datetime
    release: Release
    interpreter: str = ""
    """Python of a virtual environment of its own; empty = the one this record belongs to."""
    locked: LockedEnvironment | None = None
    """What is in that virtual environment; None: in the interpreter this record belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEnvironment:
    """One environment that this interpreter can import."""

    id: str
    """`owner/name`; the bare name for a package that no registry installed."""
    name: str
    version: str
    distribution: str
    factory: str
    interpreter: str
    """The Python that can import it."""
    installation: Installation | None
    """None: installed by other means, such as an editable install during development."""

    @property
    def sha256(self) -> str:
        """Of the wheel it was installed from; empty where no registry installed it."""
        return self.installation.release.wheel.sha256 if self.installation is not None else ""


def records_folder() -> Path:
    """Return where the records of installations are."""
    return data_folder() / "environments"


def installed_environments() -> list[InstalledEnvironment]:
    """Return every environment this interpreter can import, by id."""
    recorded = {found.distribution: found for found in _recorded()}
    found = list(recorded.values())
    for point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist.name if point.dist is not None else ""
        if distribution not in recorded:
            found.append(
                InstalledEnvironment(
                    id=_id_of(distribution, point.name),
                    name=point.name,
                    version=point.dist.version if point.dist is not None else "0",
                    distribution=distribution,
                    factory=point.value,
                    interpreter=sys.executable,
                    installation=None,
                )
            )
    return sorted(found, key=lambda environment: environment.id)


def write_record(installation: Installation) -> None:
    """Write the record of an installation, whole or not at all."""
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
    """Forget an installation; fine when there is none."""
    _record_path(release).unlink(missing_ok=True)


def _record_path(release: Release) -> Path:
    return records_folder() / release.owner / f"{release.name}.json"


def _recorded() -> list[InstalledEnvironment]:
    found: list[InstalledEnvironment] = []
    for path in sorted(records_folder().glob("*/*.json")):
        try:
            installation = Installation.model_validate_json(path.read_bytes())
            release = installation.release
            own = Path(installation.interpreter) if installation.interpreter else None
            is_there = version(release.distribution) == release.version if own is None else False
        except (ValidationError, PackageNotFoundError):
            continue
        if is_there or (own is not None and own.exists()):
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


def _id_of(distribution: str, name: str) -> str:
    """Return owner/name where the distribution's name tells the owner, else the bare name."""
    owner = distribution.removeprefix("telescope-env-").removesuffix(f"-{name}")
    is_named_so = distribution == f"telescope-env-{owner}-{name}"
    return f"{owner}/{name}" if is_named_so else name
