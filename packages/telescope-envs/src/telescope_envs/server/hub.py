"""`HubStore`: a registry in one folder, with records in SQLite and artifacts in files.

It implements the store protocol, so everything that reads registries can read it. `app` serves it
over HTTP and decides who may do what. Each change is one transaction, in which the callback `allow`
checks the caller's token, so a token that was revoked in the meantime publishes nothing.
"""

import io
import json
import logging
import shlex
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from sqlite3 import Connection
from typing import NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version

from telescope_core.base.errors import ConfigError, RegistryError, unknown_name
from telescope_core.base.terminal import acts_on_terminals
from telescope_envs.records.catalog import CatalogRow, catalog_row, write_catalog
from telescope_envs.records.files import read_file, sha256_of, write_atomically
from telescope_envs.records.model import RecordProblem, converted
from telescope_envs.records.names import check_name, check_owner, near_names
from telescope_envs.records.reading import (
    MAX_WHEEL_BYTES,
    Listing,
    Publication,
    attestation_path,
    log_unreadable,
    metadata_path,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import Namespace, RegistryConfig, Release, Status
from telescope_envs.records.schemas import ALIASES_TITLE, config_named, schema_files
from telescope_envs.rules.admission import (
    Read,
    changed_status,
    index_line,
    is_new,
    published_sha256,
    reserved_parts,
    status_file,
)
from telescope_envs.server.database import (
    FILE,
    ArtifactFiles,
    Database,
    failures_named,
    time_text,
)
from telescope_envs.server.refusals import Refusal

log = logging.getLogger(__name__)
_schema_files = cache(schema_files)


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
    return time_text(datetime.now(UTC))


API = "api"
"""Path of the server's API, relative to the registry; `config.json` contains it."""
RESERVED = "reserved.txt"


class StoredArtifact(NamedTuple):
    """The file, hash and size in bytes of one artifact."""

    path: Path
    sha256: str
    size: int


class AuditEntry(NamedTuple):
    """One change of the records."""

    at: str
    """ISO 8601, UTC."""
    event: str
    subject: str
    """The owner, the token or the release that was changed."""
    token: str
    """Id of the token that was used; empty for changes on the server's machine."""
    reason: str


class HubStore:
    """The registry in the folder `data`; a new folder becomes an empty registry.

    If it `is_read_only`, its records can be read but not changed, and the folder must exist.
    """

    def __init__(self, data: Path, *, must_exist: bool = False, is_read_only: bool = False) -> None:
        if (must_exist or is_read_only) and not is_served(data):
            raise ConfigError(
                f"{str(data)!r} is not the data folder of a served registry; give the --data of "
                "telescope hub serve"
            )
        self.data = data
        self.address = str(data)
        self.revision = ""  # the registry has no commits
        self.database = Database(data, is_read_only=is_read_only)
        self.files = ArtifactFiles(data)
        if not is_read_only:
            self.files.make_folders()
            if not (data / RESERVED).exists():
                write_atomically(data / RESERVED, _shipped_reserved().encode())
        self.releases = Releases(self.database, self.files, self.read)
        self._rows: dict[str, tuple[tuple[int, int], CatalogRow | None]] = {}

    @property
    def changes(self) -> str:
        """A number, as text, that changes with every change of the records."""
        return self.database.value("SELECT number FROM changes") or ""

    @property
    def name(self) -> str:
        """The name of the registry."""
        return self.database.value("SELECT value FROM settings WHERE name = 'name'") or "hub"

    def check(self) -> None:
        """Raise an error if nothing of it should be served: a damaged database, a bad name.

        Logs which files are missing, for instance because a backup had not all of them.
        """
        self.database.check()
        config_named(self.name)
        if lost := self.lost_files():
            shown = f"{', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}"
            log.error(
                "%s: files of releases are missing or of another size (%d): %s; nobody can install "
                "these. Copy them from a backup; telescope hub check %s lists them all",
                *(self.files.root, len(lost), shown, self.data),
            )

    def lost_files(self) -> list[str]:
        """Return the paths of the artifacts whose file is missing, or of another size."""
        rows = self.database.rows("SELECT path, sha256, size FROM artifacts ORDER BY path")
        found = [(path, self.files.path(sha256), int(size)) for path, sha256, size in rows]
        return [
            path for path, file, size in found if not file.is_file() or file.stat().st_size != size
        ]

    def listing(self) -> Listing:
        """Return its files of this moment, as a registry that is only files has them.

        Those that are lost are left out. The store must be read-only.
        """
        self.database.hold()
        environments = self.releases.states()
        paths = ["config.json", "aliases.toml", RESERVED]
        paths += [f"schema/{name}" for name in _schema_files()]
        paths += [f"namespaces/{owner}.toml" for owner, _ in self.namespaces()]
        for folder, kind in (("index", "jsonl"), ("status", "json")):
            paths += [f"{folder}/{one}.{kind}" for one in environments]
        rows = self.database.rows("SELECT path, sha256 FROM artifacts")
        artifacts = {path: self.files.path(sha256) for path, sha256 in rows}
        here = [path for path, file in artifacts.items() if file.is_file()]
        # Without the address of an interface, which no host of files has.
        config = RegistryConfig(name=self.name).as_json(indent=2) + b"\n"

        def read(path: str) -> bytes:
            if path in artifacts:
                return read_file(artifacts[path], max_bytes=MAX_WHEEL_BYTES)
            return config if path == "config.json" else self.read(path) or b""

        return Listing(sorted([*paths, *here]), read, tuple(self.lost_files()))

    def rename(self, name: str) -> None:
        """Set the name of the registry; raises ConfigError for one that clients refuse."""
        config_named(name)
        with self.database.transaction() as writer:
            writer.execute("INSERT OR REPLACE INTO settings VALUES ('name', ?)", (name,))

    def read(self, path: str) -> bytes | None:
        """Return the file at `path` of the registry's tree; None when there is none."""
        match path.split("/"):
            case ["config.json"]:
                return RegistryConfig(name=self.name, api=API).as_json(indent=2) + b"\n"
            case ["aliases.toml"]:
                return self._aliases()
            case ["reserved.txt"]:
                return (self.data / RESERVED).read_bytes()
            case ["namespaces", owner] if owner.endswith(".toml"):
                return self._namespace(owner.removesuffix(".toml"))
            case ["index", owner, file] if file.endswith(".jsonl"):
                return self.releases.lines(f"{owner}/{file.removesuffix('.jsonl')}")
            case ["status", owner, file] if file.endswith(".json"):
                return self.releases.status_record(f"{owner}/{file.removesuffix('.json')}")
            case ["schema", name]:
                found = _schema_files().get(name)
                return found.encode() if found is not None else None
            case ["v1", "index.json"]:
                return write_catalog(self.catalog())
            case _:
                return None

    def artifact(self, url: str, *, max_bytes: int, sha256: str = "") -> bytes | None:
        """Return the artifact at the relative `url`; None when there is none."""
        found = self.stored_artifact(url)
        if found is None or not found.path.is_file():
            return None
        if found.size > max_bytes:
            raise RegistryError(f"{url}: longer than {max_bytes} bytes, the limit for a wheel")
        return found.path.read_bytes()

    def stored_artifact(self, path: str) -> StoredArtifact | None:
        """Return the stored artifact that is served at `path`; None when there is none.

        Raises Refusal if it is withheld.
        """
        distribution = canonicalize_name(path.removeprefix("artifacts/").partition("-")[0])
        self.require_served(self.releases.environment_of(distribution) or "")
        rows = self.database.rows("SELECT sha256, size FROM artifacts WHERE path = ?", path)
        for sha256, size in rows:
            return StoredArtifact(self.files.path(sha256), sha256, int(size))
        return None

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment that is not withheld, sorted by id.

        Only changed rows are read again.
        """
        withheld = self.releases.withheld_owners()
        for environment, state in self.releases.states().items():
            known = self._rows.get(environment)
            if known is None or known[0] != state:
                lines = self.releases.lines(environment) or b""
                status = self.releases.status_record(environment)
                found = catalog_row(environment, lines, status)
                log_unreadable(found.unreadable)
                self._rows[environment] = (state, found.row)
        rows = (self._rows[environment][1] for environment in sorted(self._rows))
        return [row for row in rows if row and row.id.partition("/")[0] not in withheld]

    def require_served(self, environment_id: str) -> None:
        """Raise Refusal if the publications of this owner are withheld."""
        owner = environment_id.partition("/")[0]
        if owner in self.releases.withheld_owners():
            raise Refusal(
                HTTPStatus.UNAVAILABLE_FOR_LEGAL_REASONS,
                f"namespace {owner!r} is suspended, and what it published is withheld",
                "ask whoever runs this registry why",
            )

    def publish(self, publication: Publication) -> bool:
        """Store a release; False if the same bytes are already published."""
        return self.releases.add(publication)

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record by `change` applied to it; returns the new record."""
        return self.releases.change_status(environment_id, lambda status, _: change(status))

    def close(self) -> None:
        """Close the database; calling it twice is fine."""
        self.database.close()

    def add_namespace(self, owner: str, publishers: list[dict[str, str]]) -> None:
        """Add the owner `owner`, so that tokens for it can be created.

        `publishers` says whose attestations of its releases count. Refuses an owner that exists.
        """
        check_owner(owner)
        self._require_unreserved(owner)
        _check_publishers(owner, publishers)
        with self.database.transaction() as writer:
            query = "SELECT publishers FROM namespaces WHERE owner = ?"
            known = self.database.value(query, owner)
            if known is not None:
                shown = publishers_text(json.loads(known)) or "no publishers"
                raise ConfigError(
                    f"namespace {owner!r} exists already, with {shown}, and nothing was changed; "
                    f"to change its publishers, run: telescope hub namespace publishers {owner} "
                    f"--publisher KIND:ID --reason WHY --data {shlex.quote(str(self.data))}"
                )
            writer.execute(
                "INSERT INTO namespaces (owner, status, publishers, created_at) "
                "VALUES (?, 'active', ?, ?)",
                (owner, json.dumps(publishers), _now()),
            )

    def change_publishers(
        self, owner: str, publishers: list[dict[str, str]], *, reason: str
    ) -> None:
        """Replace the publishers of `owner`, whose attestations count from now on; logs it."""
        self._check_change(owner, reason)
        _check_publishers(owner, publishers)
        with self.database.transaction() as writer:
            writer.execute(
                "UPDATE namespaces SET publishers = ? WHERE owner = ?",
                (json.dumps(publishers), owner),
            )
            writer.execute(
                "INSERT INTO publisher_changes (owner, publishers, reason, changed_at) "
                "VALUES (?, ?, ?, ?)",
                (owner, publishers_text(publishers), reason, _now()),
            )

    def namespaces(self) -> list[tuple[str, str]]:
        """Return (owner, `active`, `suspended` or `withheld`) of every namespace, by owner."""
        query = (
            "SELECT owner, iif(status = 'suspended' AND withheld, 'withheld', status) "
            "FROM namespaces ORDER BY owner"
        )
        return [(owner, state) for owner, state in self.database.rows(query)]

    def suspend(self, owner: str, *, reason: str, is_withheld: bool) -> None:
        """Suspend `owner`: it cannot publish, and its tokens are refused, until it is restored.

        Releases that it published stay installable unless they are withheld.
        """
        self._change_namespace(owner, "withheld" if is_withheld else "suspended", reason)

    def restore(self, owner: str, *, reason: str) -> None:
        """Undo the suspension of `owner`."""
        if (owner, "active") in self.namespaces():
            raise ConfigError(f"namespace {owner!r} is not suspended, so there is nothing to do")
        self._change_namespace(owner, "restored", reason)

    def _check_change(self, owner: str, reason: str) -> None:
        known = [name for name, _ in self.namespaces()]
        if owner not in known:
            raise unknown_name("namespace", owner, known)
        if not reason or acts_on_terminals(reason):
            raise ConfigError(f"the reason must be one line of text, got {reason!r}; correct it")

    def _change_namespace(self, owner: str, became: str, reason: str) -> None:
        self._check_change(owner, reason)
        status = "active" if became == "restored" else "suspended"
        with self.database.transaction() as writer:
            writer.execute(
                "UPDATE namespaces SET status = ?, withheld = ? WHERE owner = ?",
                (status, became == "withheld", owner),
            )
            writer.execute(
                "INSERT INTO suspensions (owner, became, reason, changed_at) VALUES (?, ?, ?, ?)",
                (owner, became, reason, _now()),
            )

    def audit(self) -> list[AuditEntry]:
        """Return the changes and their authors, oldest first."""
        query = "SELECT at, event, subject, token, reason FROM audit WHERE event <> ? ORDER BY at"
        entries = [AuditEntry(*row) for row in self.database.rows(query, "status changed")]
        query = (
            "SELECT environment, record, changed_at, token FROM statuses "
            "ORDER BY environment, revision"
        )
        last: dict[str, Status] = {}
        for environment, record, at, token in self.database.rows(query):
            status = parse_status(record.encode(), f"a status of {environment}")
            if environment in last:  # the first is made when the environment is published
                said = [*_said(environment, last[environment], status)]
                for event, subject, reason in said or [("status sent again", environment, "")]:
                    entries.append(AuditEntry(at, event, subject, token, reason))
            last[environment] = status
        return sorted(entries, key=lambda entry: entry.at)

    def add_alias(self, name: str, environment_id: str) -> None:
        """Make the bare `name` an alias of `environment_id`, permanently."""
        check_name(name)
        self._require_unreserved(name)
        if environment_id not in self.releases.states():
            raise unknown_name("environment", environment_id, self.releases.states())
        with self.database.transaction() as writer:
            known = self.database.value("SELECT environment FROM aliases WHERE name = ?", name)
            if known not in (None, environment_id):
                raise Refusal(
                    HTTPStatus.CONFLICT,
                    f"{name!r} points to {known}, and a bare name is never given to another "
                    "environment",
                    "choose another name",
                )
            values = (name, environment_id, _now())
            writer.execute("INSERT OR IGNORE INTO aliases VALUES (?, ?, ?)", values)

    def _require_unreserved(self, name: str) -> None:
        if reserved_parts(self.read, name):
            raise RegistryError(f"the name {name!r} is reserved ({RESERVED}); choose another")

    def _aliases(self) -> bytes:
        rows = self.database.rows("SELECT name, environment FROM aliases ORDER BY name")
        lines = "".join(f'{name} = "{environment}"\n' for name, environment in rows)
        return f"{ALIASES_TITLE}[aliases]\n{lines}".encode()

    def _namespace(self, owner: str) -> bytes | None:
        query = "SELECT status, withheld, publishers FROM namespaces WHERE owner = ?"
        for status, withheld, publishers in self.database.rows(query, owner):
            lines = [f'owner = "{owner}"\nstatus = "{status}"\n']
            if status == "suspended":
                lines.append(f"withheld = {'true' if withheld else 'false'}\n")
            for publisher in json.loads(publishers):
                texts = "".join(
                    f"{key} = {json.dumps(text, ensure_ascii=False)}\n"
                    for key, text in publisher.items()
                )
                lines.append(f"\n[[publishers]]\n{texts}")
            return "".join(lines).encode()
        return None


def is_served(folder: Path) -> bool:
    """Return whether `folder` is the data folder of a server."""
    return (folder / FILE).is_file()


@contextmanager
def opened_hub(
    data: Path, *, must_exist: bool = True, is_read_only: bool = False
) -> Generator[HubStore]:
    """Open the registry in `data`; what its disk or database refuses is a RegistryError."""
    with (
        failures_named(data / FILE),
        closing(HubStore(data, must_exist=must_exist, is_read_only=is_read_only)) as hub,
    ):
        yield hub


def publishers_text(publishers: list[dict[str, str]]) -> str:
    """Return publishers as an operator writes them, `repository:acme/envs,workflow=ci.yml`."""
    return " ".join(
        f"{one['kind']}:{one['id']}"
        + "".join(f",{key}={one[key]}" for key in ("workflow", "issuer") if one.get(key))
        for one in publishers
    )


def _said(environment: str, before: Status, now: Status) -> Iterator[tuple[str, str, str]]:
    """Yield (event, subject, reason) of each difference between two statuses of an environment."""
    for version, reason in now.yanked.items():
        if before.yanked.get(version) != reason:
            yield "yanked", f"{environment} {version}", reason
    for version in sorted(before.yanked.keys() - now.yanked.keys()):
        yield "yank undone", f"{environment} {version}", ""
    if now.deprecated != before.deprecated and now.deprecated:
        instead = now.deprecated.replacement
        reason = f"{now.deprecated.reason}{f'; use {instead}' if instead else ''}"
        yield "deprecated", environment, reason
    elif now.deprecated != before.deprecated:
        yield "deprecation undone", environment, ""
    for text in now.advisories:
        if text not in before.advisories:
            yield "advisory added", environment, text
    for text in before.advisories:
        if text not in now.advisories:
            yield "advisory removed", environment, text


def _check_publishers(owner: str, publishers: list[dict[str, str]]) -> None:
    try:
        converted(Namespace, {"owner": owner, "publishers": publishers})
    except RecordProblem as problem:
        raise ConfigError(f"namespace {owner}: {problem}; correct it") from None


def _shipped_reserved() -> str:
    """Return the reserved names of the registry that this package or its checkout includes."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "snapshot", *(parent / "registry" for parent in here.parents)):
        if (folder / RESERVED).is_file():
            return (folder / RESERVED).read_text(encoding="utf-8")
    raise RegistryError(f"telescope-envs is installed without {RESERVED}; install it again")
