"""`HubStore`: a registry in one folder, with records in SQLite and artifacts in files.

It implements the store protocol, so everything that reads registries can read it. `app` serves it
over HTTP and decides who may do what.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from telescope_core.base.errors import ConfigError, RegistryError, unknown_name
from telescope_core.base.terminal import acts_on_terminals
from telescope_envs.records.catalog import CatalogRow, catalog_row, write_catalog
from telescope_envs.records.model import RecordProblem, converted
from telescope_envs.records.names import check_name, check_owner
from telescope_envs.records.reading import Publication, log_unreadable
from telescope_envs.records.release import Namespace, RegistryConfig, Status
from telescope_envs.records.schemas import ALIASES_TITLE, schema_files
from telescope_envs.rules.admission import reserved_parts
from telescope_envs.server.database import FILE, ArtifactFiles, Database
from telescope_envs.server.refusals import Refusal
from telescope_envs.server.releases import Releases

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
    """The registry in the folder `data`; a new folder becomes an empty registry."""

    def __init__(self, data: Path, *, must_exist: bool = False) -> None:
        if must_exist and not (data / FILE).is_file():
            raise ConfigError(
                f"{str(data)!r} is not the data folder of a served registry; give the --data of "
                "telescope hub serve"
            )
        self.data = data
        self.address = str(data)
        self.revision = ""  # the registry has no commits
        self.database = Database(data)
        self.files = ArtifactFiles(data)
        if not (data / RESERVED).exists():
            (data / RESERVED).write_text(_shipped_reserved(), encoding="utf-8")
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

    def rename(self, name: str) -> None:
        """Set the name of the registry."""
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
                found = _schemas().get(name)
                return found.encode() if found is not None else None
            case ["v1", "index.json"]:
                return write_catalog(self.catalog())
            case _:
                return None

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artifact at the relative `url`; None when there is none."""
        found = self.stored_artifact(url)
        if found is None:
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

        `publishers` is only recorded for people to read.
        """
        check_owner(owner)
        if reserved_parts(self.read, owner):
            raise RegistryError(
                f"the owner name {owner!r} is reserved ({RESERVED}); choose another"
            )
        try:
            converted(Namespace, {"owner": owner, "publishers": publishers})
        except RecordProblem as problem:
            raise ConfigError(f"namespace {owner}: {problem}; correct it") from None
        record = json.dumps(publishers)
        with self.database.transaction() as writer:
            writer.execute(
                "INSERT INTO namespaces (owner, status, publishers, created_at) "
                "VALUES (?, 'active', ?, datetime('now')) "
                "ON CONFLICT (owner) DO UPDATE SET publishers = excluded.publishers",
                (owner, record),
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

    def _change_namespace(self, owner: str, became: str, reason: str) -> None:
        known = [name for name, _ in self.namespaces()]
        if owner not in known:
            raise unknown_name("namespace", owner, known)
        if not reason or acts_on_terminals(reason):
            raise ConfigError(f"the reason must be one line of text, got {reason!r}; correct it")
        status = "active" if became == "restored" else "suspended"
        with self.database.transaction() as writer:
            writer.execute(
                "UPDATE namespaces SET status = ?, withheld = ? WHERE owner = ?",
                (status, became == "withheld", owner),
            )
            writer.execute(
                "INSERT INTO suspensions (owner, became, reason, changed_at) VALUES (?, ?, ?, ?)",
                (owner, became, reason, datetime.now(UTC).isoformat(timespec="seconds")),
            )

    def audit(self) -> list[AuditEntry]:
        """Return the changes and their authors, oldest first."""
        rows = self.database.rows("SELECT at, event, subject, token, reason FROM audit ORDER BY at")
        return [AuditEntry(*row) for row in rows]

    def add_alias(self, name: str, environment_id: str) -> None:
        """Make the bare `name` an alias of `environment_id`, permanently."""
        check_name(name)
        if environment_id not in self.releases.states():
            raise unknown_name("environment", environment_id, self.releases.states())
        known = self.database.value("SELECT environment FROM aliases WHERE name = ?", name)
        if known not in (None, environment_id):
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"{name!r} points to {known}, and a bare name is never given to another "
                "environment",
                "choose another name",
            )
        with self.database.transaction() as writer:
            writer.execute("INSERT OR IGNORE INTO aliases VALUES (?, ?)", (name, environment_id))

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


@cache
def _schemas() -> dict[str, str]:
    return schema_files()


def _shipped_reserved() -> str:
    """Return the reserved names of the registry that this package or its checkout includes."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "snapshot", *(parent / "registry" for parent in here.parents)):
        if (folder / RESERVED).is_file():
            return (folder / RESERVED).read_text(encoding="utf-8")
    raise RegistryError(f"telescope-envs is installed without {RESERVED}; install it again")
