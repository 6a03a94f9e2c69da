"""The environments that are installed for this interpreter, and the releases they came from.

`inventory` finds them. Here are their whole records, which are read only where they are needed, so
that a damaged one does not hide what is installed.
"""

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.records.inventory import (
    RECORD_FORMAT,
    id_of,
    record_path,
    recorded_installations,
    unrecorded,
)
from telescope_envs.records.lockfile import LockedEnvironment
from telescope_envs.records.reading import problem_of
from telescope_envs.records.release import Release


class Installation(BaseModel):
    """The record that `env install` writes."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    format: int = RECORD_FORMAT
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
    record: Path | None = None
    """None if it was installed by other means, such as an editable install."""
    registry: str = ""
    """Address of the registry it came from; empty without a record."""
    sha256: str = ""
    """sha256 of the wheel it was installed from; empty without a record."""

    @property
    def is_recorded(self) -> bool:
        """Whether it came from a registry."""
        return self.record is not None

    @property
    def installation(self) -> Installation | None:
        """The whole record, if it has one; raises EnvironmentLoadError if it is damaged."""
        if self.record is None:
            return None
        try:
            return Installation.model_validate_json(self.record.read_bytes())
        except ValidationError as error:
            raise EnvironmentLoadError(
                f"{self.record}: {problem_of(error)}; the record of this installation is damaged, "
                f"so install it again: telescope env install {self.id}"
            ) from None

    @property
    def is_damaged(self) -> bool:
        """Whether it has a record that cannot be read as a whole."""
        try:
            _ = self.installation
        except EnvironmentLoadError:
            return True
        return False


def installed_environments() -> list[InstalledEnvironment]:
    """Return every environment this interpreter can import, by id."""
    found = [
        InstalledEnvironment(
            id=one.id,
            name=one.name,
            version=one.version,
            distribution=one.distribution,
            factory=one.factory,
            interpreter=one.interpreter or sys.executable,
            record=one.path,
            registry=one.registry,
            sha256=one.sha256,
        )
        for one in recorded_installations()
    ]
    for entry in unrecorded({one.distribution for one in found}):
        found.append(
            InstalledEnvironment(
                id=id_of(entry),
                name=entry.name,
                version=entry.distribution.version,
                distribution=entry.distribution.name,
                factory=entry.target,
                interpreter=sys.executable,
            )
        )
    return sorted(found, key=lambda environment: environment.id)


def write_record(installation: Installation) -> None:
    """Write the record of an installation atomically."""
    path = record_path(installation.release.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_text(installation.model_dump_json(by_alias=True, indent=2))
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def remove_record(environment_id: str) -> None:
    """Remove the record of the installation of owner/name, if there is one."""
    record_path(environment_id).unlink(missing_ok=True)
