"""`telescope.lock`: the wheel of each environment that a project uses, and its packages.

The file is meant to be committed. Its bytes depend only on its contents and hold no address of a
package index, so a mirror works as well. It can be read on its own; installing writes it.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from telescope_core.errors import ConfigError, RegistryError, nearest
from telescope_envs.records.documents import read_toml
from telescope_envs.records.files import locked
from telescope_envs.records.inventory import (
    LOCK_NAME,
    find_lock,
)
from telescope_envs.records.names import (
    check_name,
    check_owner,
    module_name,
)
from telescope_envs.records.release import (
    ReleaseVersion,
    Sha256,
)

FORMAT_VERSION = 1
REQUIREMENT_LINE = re.compile(
    r"(?P<pin>[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._!+-]*)"
    r"(?P<marker> ; [!-\[\]-~ ]+?)?"
    r"(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)"
)
"""One locked package, as a whole line. It has no line breaks and no backslash in it: uv reads the
same line, and must not see more in it than this does."""
_HEAD = "# Written by telescope; commit it. `telescope env sync` installs exactly this."
_REMEDY = (
    "take the last good one from version control, or remove it and run telescope env install again"
)


class _Locked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class LockedDataset(_Locked):
    """One dataset that a locked environment can load."""

    repo: str
    revision: str


class LockedEnvironment(_Locked):
    """One environment: its wheel, and the packages that are installed with it."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")]
    """`owner/name`."""
    version: ReleaseVersion
    wheel: str
    """File name, which follows from id and version."""
    sha256: Sha256
    """Digest of the wheel."""
    registry: str
    """Its address, in the form that `--registry` accepts, without credentials."""
    revision: str = ""
    """The registry's commit; empty where it has none."""
    protocol: str
    """Versions of the environment protocol that it supports, as `lowest-highest`."""
    python: Annotated[str, Field(pattern=r"^3\.[0-9]+$")]
    """The Python that the requirements were chosen for, such as 3.11."""
    requirements: tuple[str, ...]
    """`name==version --hash=sha256:...` of every other package in its virtual environment."""
    requirements_sha256: Sha256
    """Digest of those lines."""
    datasets: tuple[LockedDataset, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of its wheel, requirements and Python: equal digests run the same bytes."""
        parts = (self.sha256, self.requirements_sha256, self.python)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    # A lock comes with a project that somebody else wrote. Its fields become paths and lines for
    # uv, so each is exactly of the form that installing writes.
    @model_validator(mode="after")
    def _require_own_names(self) -> "LockedEnvironment":
        owner, _, name = self.id.partition("/")
        module = module_name(check_owner(owner), check_name(name))
        wheel = f"{module}-{self.version}-py3-none-any.whl"
        if self.wheel != wheel:
            raise ValueError(f"wheel: expected {wheel!r}, got {self.wheel!r}")
        for line in self.requirements:
            if not is_requirement_line(line):
                raise ValueError(
                    f"requirements: expected name==version with hashes on one line, got {line!r}"
                )
        return self

    @model_validator(mode="after")
    def _require_own_digest(self) -> "LockedEnvironment":
        if self.requirements_sha256 != digest_of(self.requirements):
            raise ValueError("requirements_sha256 is not the digest of its requirements")
        return self


class Lock(_Locked):
    """A whole `telescope.lock`, sorted by id."""

    version: int = FORMAT_VERSION
    environments: tuple[LockedEnvironment, ...] = ()

    def find(self, environment_id: str) -> LockedEnvironment | None:
        """Return the entry of owner/name; None if the lock has none."""
        return next((one for one in self.environments if one.id == environment_id), None)

    def merged(self, changed: Iterable[LockedEnvironment]) -> "Lock":
        """Return a lock with `changed` added, in place of entries with the same ids."""
        entries = {one.id: one for one in self.environments} | {one.id: one for one in changed}
        return Lock(environments=tuple(entries[key] for key in sorted(entries)))

    def without(self, ids: Iterable[str]) -> "Lock":
        """Return a lock without the entries of `ids`."""
        gone = set(ids)
        return Lock(environments=tuple(one for one in self.environments if one.id not in gone))


def is_requirement_line(line: str) -> bool:
    """Whether `line` locks one package, and says nothing else to a reader of requirements."""
    found = REQUIREMENT_LINE.fullmatch(line)
    if found is None:
        return False
    try:
        Requirement(found["pin"] + (found["marker"] or ""))
    except (ValueError, RecursionError):
        return False
    return True


def digest_of(requirements: Iterable[str]) -> str:
    """Return the sha256 of requirement lines."""
    return hashlib.sha256("".join(f"{line}\n" for line in requirements).encode()).hexdigest()


def lock_path(folder: Path | None = None) -> Path:
    """Return the telescope.lock to write for `folder`: the nearest one, else a new one in it."""
    return find_lock(folder) or (folder or Path.cwd()).resolve() / LOCK_NAME


def read_lock(path: Path) -> Lock:
    """Read a lock; a missing file is an empty lock. Raises ConfigError with line and remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Lock()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; {_REMEDY}") from error
    return parse_lock(text, str(path), remedy=_REMEDY)


def parse_lock(text: str, where: str, *, remedy: str) -> Lock:
    """Return the lock in `text`; ConfigError names `where`, the line, and the `remedy`."""
    try:
        table = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not TOML: {error}; {remedy}") from error
    _require_version(table, where, remedy)
    try:
        lock = Lock.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}:{_what_is_wrong(error, text)}; {remedy}") from None
    except RegistryError as error:
        raise ConfigError(f"{where}: {error}; {remedy}") from None
    ids = [one.id for one in lock.environments]
    for twice in sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f"{where}: holds {twice} twice; remove one, or {remedy}")
    return lock


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock atomically; equal locks give equal bytes."""
    scratch = tempfile.NamedTemporaryFile(  # noqa: SIM115
        "w", dir=path.parent, prefix=f".{LOCK_NAME}.", delete=False, encoding="utf-8"
    )
    try:
        with scratch:
            scratch.write(render(lock))
            scratch.flush()
            os.fsync(scratch.fileno())
        os.chmod(scratch.name, 0o644)
        os.replace(scratch.name, path)
    except BaseException:
        Path(scratch.name).unlink(missing_ok=True)
        raise


def change_lock(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    """Apply `change` to the lock at `path`, one process at a time; returns the new lock.

    An existing file is not touched if nothing changes.
    """
    with locked(path.parent, what=f"{path} is being changed"):
        before = read_lock(path)
        after = change(before)
        if after != before or not path.is_file():
            write_lock(path, after)
    return after


def render(lock: Lock) -> str:
    """Return the text of a lock."""
    parts = [f"{_HEAD}\nversion = {FORMAT_VERSION}\n"]
    for one in sorted(lock.environments, key=lambda one: one.id):
        parts.append("\n[[environments]]\n")
        fields = one.model_dump(exclude={"requirements", "datasets"})
        parts += [f"{name} = {_quoted(text)}\n" for name, text in fields.items() if text != ""]
        lines = "".join(f"    {_quoted(line)},\n" for line in one.requirements)
        parts.append(f"requirements = [\n{lines}]\n" if lines else "requirements = []\n")
        if one.datasets:
            rows = "".join(
                f"    {{ repo = {_quoted(data.repo)}, revision = {_quoted(data.revision)} }},\n"
                for data in one.datasets
            )
            parts.append(f"datasets = [\n{rows}]\n")
    return "".join(parts)


def _quoted(text: str) -> str:
    """Return a basic string of TOML, which is a JSON string with 0x7f escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _require_version(table: dict[str, Any], where: str, remedy: str) -> None:
    version = table.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(
            f"{where} has format version {version}, but this Telescope reads only up to "
            f"{FORMAT_VERSION}; upgrade telescope-envs"
        )
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{where}: expected version = {FORMAT_VERSION}, got {version!r}; {remedy}"
        )


def _what_is_wrong(error: ValidationError, text: str) -> str:
    """Return the line and the field that are wrong, and why."""
    first = error.errors()[0]
    place = first["loc"]
    index = place[1] if len(place) > 1 and place[0] == "environments" else None
    field = str(place[2]) if index is not None and len(place) > 2 else str((*place, "")[0])
    line = _line_of(text, index, field)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        fields = LockedEnvironment.model_fields if index is not None else Lock.model_fields
        close = nearest(field, fields)
        message = f"unknown key{f'; did you mean {close[0]!r}?' if close else ''}"
    named = f"{field}: " if field and field != "environments" else ""
    return f"{line}: {named}{message}"


def _line_of(text: str, index: object, field: str) -> int:
    """Return the line, from 1, of `field` in the entry `index`, else the line of the entry."""
    heads = [i for i, line in enumerate(text.splitlines()) if line.strip() == "[[environments]]"]
    start = heads[index] if isinstance(index, int) and index < len(heads) else 0
    following = [head for head in heads if head > start] if isinstance(index, int) else []
    lines = text.splitlines()[start : following[0] if following else None]
    for offset, line in enumerate(lines):
        if re.match(rf"\s*{re.escape(field)}\s*=", line):
            return start + offset + 1
    return start + 1
