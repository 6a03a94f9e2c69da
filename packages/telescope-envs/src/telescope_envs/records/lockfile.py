"""`telescope.lock`: the wheel of each environment that a project uses, and its packages.

The file is meant to be committed. Its bytes depend only on its contents and hold no address of a
package index, so a mirror works as well. It can be read on its own; installing writes it.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from telescope_core.base.errors import ConfigError, nearest
from telescope_envs.records.files import locked, read_file, sha256_of, write_atomically
from telescope_envs.records.model import Record, RecordProblem, converted, read_toml
from telescope_envs.records.names import check_name, check_owner, check_version, module_name
from telescope_envs.records.release import check_digest, check_each, require

FORMAT_VERSION = 1
LOCK_NAME = "telescope.lock"
_PYTHON = re.compile(r"3\.[0-9]+")
_UNKNOWN = re.compile(r"Object contains unknown field (?P<field>.*)")
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


class LockedDataset(
    Record, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One dataset that a locked environment can load."""

    repo: str
    revision: str
    sha256: str = ""
    """Digest of its files, which a bundle brought; empty if it is read from the Hub."""


class LockedEnvironment(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One environment: its wheel, and the packages that are installed with it."""

    id: str
    """`owner/name`."""
    version: str
    wheel: str
    """File name, which follows from id and version."""
    sha256: str
    """Digest of the wheel."""
    registry: str
    """Its address, in the form that `--registry` accepts, without credentials.

    In the file, a folder that moves with the lock is relative to it, and begins with a dot.
    """
    revision: str = ""
    """The registry's commit; empty where it has none."""
    protocol: str
    """Versions of the environment protocol that it supports, as `lowest-highest`."""
    python: str
    """The Python that the requirements were chosen for, such as 3.11."""
    requirements: tuple[str, ...]
    """`name==version --hash=sha256:...` of every other package in its virtual environment."""
    requirements_sha256: str
    """Digest of those lines."""
    datasets: tuple[LockedDataset, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of its wheel, requirements and Python: equal digests run the same bytes."""
        parts = (self.sha256, self.requirements_sha256, self.python)
        return sha256_of("\n".join(parts))

    def check(self) -> None:
        """Raise RecordProblem for content that installing does not write.

        A lock comes with a project that somebody else wrote. Its fields become paths and lines for
        uv, so each is exactly of the form that installing writes.
        """
        owner, _, name = self.id.partition("/")
        require("id", check_owner, owner)
        require("id", check_name, name)
        require("version", check_version, self.version)
        check_digest("sha256", self.sha256)
        check_digest("requirements_sha256", self.requirements_sha256)
        if not _PYTHON.fullmatch(self.python):
            raise RecordProblem(f"python: expected a version such as 3.11, got {self.python!r}")
        wheel = f"{module_name(owner, name)}-{self.version}-py3-none-any.whl"
        if self.wheel != wheel:
            raise RecordProblem(f"wheel: expected {wheel!r}, got {self.wheel!r}")
        for number, data in enumerate(self.datasets):
            if data.sha256:
                check_digest(f"datasets.{number}.sha256", data.sha256)
        for line in self.requirements:
            if not is_requirement_line(line):
                raise RecordProblem(
                    f"requirements: expected name==version with hashes on one line, got {line!r}"
                )
        if self.requirements_sha256 != digest_of(self.requirements):
            problem = "is not the digest of its requirements"
            raise RecordProblem(f"requirements_sha256: {problem}")


class Lock(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole `telescope.lock`, sorted by id."""

    version: int = FORMAT_VERSION
    environments: tuple[LockedEnvironment, ...] = ()

    def check(self) -> None:
        """Raise RecordProblem if an entry has one."""
        check_each("environments", self.environments)

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
    """Return whether `line` locks one package, and means nothing else in a requirements file."""
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
    return sha256_of("".join(f"{line}\n" for line in requirements))


def find_lock(folder: Path | None = None) -> Path | None:
    """Return the nearest telescope.lock in `folder` (default: here) or above; None if none."""
    start = (folder or Path.cwd()).resolve()
    paths = (above / LOCK_NAME for above in (start, *start.parents))
    return next((path for path in paths if path.is_file()), None)


def lock_path(folder: Path | None = None) -> Path:
    """Return the telescope.lock to write for `folder`: the nearest one, else a new one in it."""
    return find_lock(folder) or (folder or Path.cwd()).resolve() / LOCK_NAME


def read_lock(path: Path) -> Lock:
    """Read a lock; a missing file is an empty lock. Raises ConfigError with line and remedy."""
    try:
        text = read_file(path, follows_link=True).decode()
    except FileNotFoundError:
        return Lock()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; {_REMEDY}") from error
    lock = parse_lock(text, str(path), remedy=_REMEDY)
    folder = os.path.realpath(path.parent)
    return _with_registries(lock, lambda registry: _absolute(registry, folder))


def parse_lock(text: str, where: str, *, remedy: str) -> Lock:
    """Return the lock in `text`; ConfigError names `where`, the line, and the `remedy`."""
    try:
        table = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not TOML: {error}; {remedy}") from error
    _require_version(table, where, remedy)
    try:
        lock = converted(Lock, table)
    except RecordProblem as problem:
        raise ConfigError(f"{where}:{_what_is_wrong(str(problem), text)}; {remedy}") from None
    ids = [one.id for one in lock.environments]
    for twice in sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f"{where}: holds {twice} twice; remove one, or {remedy}")
    return lock


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock atomically; equal locks give equal bytes."""
    write_atomically(path, render(lock).encode())


def change_lock(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    """Apply `change` to the lock at `path`, one process at a time; returns the new lock.

    An existing file is not touched if nothing changes. Registries in the lock's git repository, or
    without git in its folder, are written relative to it, so that they are found in every clone.
    """
    folder = Path(os.path.realpath(path.parent))
    with locked(path.parent, what=f"{path} is being changed"):
        before = read_lock(path)
        after = change(before)
        if after != before or not path.is_file():
            write_lock(path, _with_registries(after, lambda place: _relative(place, folder)))
    return after


def _with_registries(lock: Lock, change: Callable[[str], str]) -> Lock:
    entries = (one.changed(registry=change(one.registry)) for one in lock.environments)
    return Lock(environments=tuple(entries))


def _absolute(registry: str, folder: str) -> str:
    """Return a registry without regard to the lock's `folder`; names and addresses stay."""
    return os.path.normpath(f"{folder}/{registry}") if registry.startswith(".") else registry


def _relative(registry: str, folder: Path) -> str:
    """Return a registry as a path from the lock's real `folder`, if it moves together with it.

    Links are kept, because they are meant to be followed again: only the way to the root of the
    project is compared on disk.
    """
    if not os.path.isabs(registry) or "\0" in registry:
        return registry
    root = next((at for at in (folder, *folder.parents) if (at / ".git").exists()), folder)
    path = Path(registry)
    top = next((at for at in (path, *path.parents) if os.path.realpath(at) == str(root)), None)
    if top is None or ".." in path.relative_to(top).parts:
        return registry
    found = os.path.relpath(root / path.relative_to(top), folder)
    return found if found.startswith(".") else f"./{found}"


def render(lock: Lock) -> str:
    """Return the text of a lock."""
    parts = [f"{_HEAD}\nversion = {FORMAT_VERSION}\n"]
    for one in sorted(lock.environments, key=lambda one: one.id):
        parts.append("\n[[environments]]\n")
        fields = one.as_table()
        for name in ("requirements", "datasets"):
            del fields[name]
        parts += [f"{name} = {_quoted(text)}\n" for name, text in fields.items() if text != ""]
        lines = "".join(f"    {_quoted(line)},\n" for line in one.requirements)
        parts.append(f"requirements = [\n{lines}]\n" if lines else "requirements = []\n")
        if one.datasets:
            rows = (
                ", ".join(f"{name} = {_quoted(text)}" for name, text in data.as_table().items())
                for data in one.datasets
            )
            lines = "".join(f"    {{ {row} }},\n" for row in rows)
            parts.append(f"datasets = [\n{lines}]\n")
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


def _what_is_wrong(problem: str, text: str) -> str:
    """Return the line and the field that are wrong, and the reason."""
    place, _, message = problem.partition(": ")
    steps = place.split(".")
    index = int(steps[1]) if steps[0] == "environments" and len(steps) > 1 else None
    unknown = _UNKNOWN.fullmatch(message)
    field = (steps[2] if len(steps) > 2 else "") if index is not None else steps[0]
    if unknown is not None:
        field = unknown["field"]
        fields = (LockedEnvironment if index is not None else Lock).__struct_fields__
        close = nearest(field, fields)
        message = f"unknown key{f'; did you mean {close[0]!r}?' if close else ''}"
    named = f"{field}: " if field and field not in ("environments", "record") else ""
    return f"{_line_of(text, index, field)}: {named}{message}"


def _line_of(text: str, index: int | None, field: str) -> int:
    """Return the line, from 1, of `field` in the entry `index`, else the line of the entry."""
    heads = [i for i, line in enumerate(text.splitlines()) if line.strip() == "[[environments]]"]
    start = heads[index] if index is not None and index < len(heads) else 0
    following = [head for head in heads if head > start] if index is not None else []
    lines = text.splitlines()[start : following[0] if following else None]
    for offset, line in enumerate(lines):
        if re.match(rf"\s*{re.escape(field)}\s*=", line):
            return start + offset + 1
    return start + 1
