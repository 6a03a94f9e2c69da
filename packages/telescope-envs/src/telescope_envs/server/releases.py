"""Read releases and statuses from SQLite, and add each in one transaction.

The contents of a wheel are checked before, in `checks`. The callback `allow` checks the caller's
token inside the transaction, so a token that was revoked in the meantime publishes nothing.
"""

import io
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from http import HTTPStatus
from sqlite3 import Connection

from packaging.utils import canonicalize_name
from packaging.version import Version

from telescope_envs.records.files import sha256_of
from telescope_envs.records.names import near_names
from telescope_envs.records.reading import (
    Publication,
    attestation_path,
    metadata_path,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import Release, Status
from telescope_envs.rules.admission import (
    Read,
    changed_status,
    index_line,
    is_new,
    published_sha256,
    status_file,
)
from telescope_envs.server.database import ArtifactFiles, Database
from telescope_envs.server.refusals import Refusal


def _anybody() -> str:
    return ""


class Releases:
    """Reads and adds releases and statuses; `read` returns any file of the registry's tree."""

    def __init__(self, database: Database, files: ArtifactFiles, read: Read) -> None:
        self._database = database
        self._files = files
        self._read = read

    def lines(self, environment_id: str) -> bytes | None:
        """Return the index file of an environment; None when it has no release."""
        rows = self._database.rows(
            "SELECT line FROM releases WHERE environment = ? ORDER BY number", environment_id
        )
        return "".join(line for (line,) in rows).encode() if rows else None

    def all_of(self, environment_id: str) -> list[Release]:
        """Return the releases of an environment that can be read, oldest version first."""
        path = f"index/{environment_id}.jsonl"
        found = read_releases(self.lines(environment_id) or b"", environment_id, path)
        return sorted(found.releases, key=lambda release: Version(release.version))

    def distributions(self) -> list[str]:
        """Return the distributions that are not withheld, sorted."""
        rows = self._database.rows("SELECT DISTINCT distribution, environment FROM releases")
        withheld = self.withheld_owners()
        return sorted(name for name, one in rows if one.partition("/")[0] not in withheld)

    def environment_of(self, distribution: str) -> str | None:
        """Return the id of the environment with that distribution; None if there is none."""
        query = "SELECT environment FROM releases WHERE distribution = ? LIMIT 1"
        return self._database.value(query, distribution)

    def withheld_owners(self) -> set[str]:
        """Return the suspended owners whose releases are not served."""
        query = "SELECT owner FROM namespaces WHERE status = 'suspended' AND withheld"
        return {owner for (owner,) in self._database.rows(query)}

    def status_record(self, environment_id: str) -> bytes | None:
        """Return the served status file of an environment."""
        found = self._database.value(
            "SELECT record FROM statuses WHERE environment = ? ORDER BY revision DESC LIMIT 1",
            environment_id,
        )
        return found.encode() if found is not None else None

    def status(self, environment_id: str) -> Status:
        """Return the status of an environment."""
        return parse_status(self.status_record(environment_id), "status")

    def states(self) -> dict[str, tuple[int, int]]:
        """Return environment id -> (number of its last release, revision of its status)."""
        rows = self._database.rows(
            "SELECT environment, max(number), "
            "(SELECT max(revision) FROM statuses WHERE statuses.environment = r.environment) "
            "FROM releases AS r GROUP BY environment"
        )
        return {environment: (int(number), int(status)) for environment, number, status in rows}

    def add(
        self,
        publication: Publication,
        *,
        allow: Callable[[], str] = _anybody,
        may_be_near: bool = False,
    ) -> bool:
        """Store the files, then the release; False if the same bytes are already published.

        `allow` returns the id of the token that publishes, or raises. A new name that is similar to
        another owner's is refused unless `may_be_near`.
        """
        release = publication.release
        # Files are withdrawn last, because committing the transaction can fail as well.
        with ExitStack() as stored, self._database.transaction() as writer:
            token = allow()
            published = published_sha256(self._read, release.id, release.version)
            if published not in (None, release.wheel.sha256):
                raise Refusal(
                    HTTPStatus.CONFLICT,
                    f"{release.id} {release.version} is already published with different bytes, "
                    "and releases are never replaced",
                    "raise the version in its pyproject.toml",
                )
            if not is_new(self._read, publication):
                return False
            if not may_be_near and self.lines(release.id) is None:
                self._check_new_name(release)
            files = _files(publication)
            stored.enter_context(self._files.stored(files.values()))
            _insert(writer, release, files, token)
        return True

    def change_status(
        self,
        environment_id: str,
        change: Callable[[Status, bytes], Status],
        *,
        allow: Callable[[], str] = _anybody,
    ) -> Status:
        """Add the next revision of a status: `change` of the current record and its bytes."""
        with self._database.transaction() as writer:
            token = allow()
            before = self.status_record(environment_id) or b""

            def changed(status: Status) -> Status:
                return change(status, before)

            status, record = changed_status(self._read, environment_id, changed)
            values = (environment_id, record.decode(), _now(), token, environment_id)
            writer.execute(
                "INSERT INTO statuses SELECT ?, max(revision) + 1, ?, ?, ? FROM statuses "
                "WHERE environment = ?",
                values,
            )
        return status

    def _check_new_name(self, release: Release) -> None:
        """Refuse the first release under a name that is confusingly similar to another owner's."""
        others = [one for one in self.states() if not one.startswith(f"{release.owner}/")]
        near = near_names(release.name, [other.partition("/")[2] for other in others])
        if near:
            known = ", ".join(sorted(o for o in others if o.partition("/")[2] in near))
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"the name {release.name!r} is easily confused with {known}",
                "choose another name, or ask whoever runs this registry to publish its first "
                "release",
            )


def _files(publication: Publication) -> dict[str, bytes]:
    """Return path in the registry's tree -> bytes of the publication's artifacts."""
    release = publication.release
    wheel = f"artifacts/{release.wheel.filename}"
    with zipfile.ZipFile(io.BytesIO(publication.wheel)) as archive:
        info = f"{release.module}-{release.version}.dist-info"
        metadata = archive.read(f"{info}/METADATA")
    files = {wheel: publication.wheel, metadata_path(wheel): metadata}
    if publication.attestation:
        files[attestation_path(wheel)] = publication.attestation
    return files


def _insert(writer: Connection, release: Release, files: dict[str, bytes], token: str) -> None:
    rows = [(path, sha256_of(data), len(data)) for path, data in files.items()]
    writer.executemany("INSERT INTO artifacts VALUES (?, ?, ?)", rows)
    writer.execute(
        "INSERT INTO releases (environment, version, distribution, line, received_at, token) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (
            *(release.id, release.version, canonicalize_name(release.distribution)),
            *(index_line(release).decode(), _now(), token),
        ),
    )
    writer.execute(
        "INSERT OR IGNORE INTO statuses VALUES (?, 0, ?, ?, ?)",
        (release.id, status_file(Status()).decode(), _now(), token),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
