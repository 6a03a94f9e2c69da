"""Read the whole tree of a registry and check each of its files and names."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telescope_core.base.errors import RegistryError
from telescope_envs.records.names import distribution_name
from telescope_envs.records.reading import (
    REMOVED_PATH,
    Listing,
    folder_listing,
    parse_aliases,
    parse_namespace,
    parse_record,
    parse_removals,
    parse_status,
    read_releases,
    repeated_versions,
)
from telescope_envs.records.release import RegistryConfig, Release, Removals
from telescope_envs.records.schemas import schema_files
from telescope_envs.rules.admission import misnamed, reserved_parts

_LAYOUT = re.compile(
    r"config\.json|aliases\.toml|reserved\.txt|removed\.toml|README\.md|LICENSE"
    r"|namespaces/[^/]+\.toml|index/[^/]+/[^/]+\.jsonl|status/[^/]+/[^/]+\.json"
    r"|artifacts/.+|schema/[^/]+\.json|v1/.+|simple/.+"
)
_CLOCK_SKEW = timedelta(hours=1)
_RESTORE = "restore it from the git history, or correct it before committing it"
Record = TypeVar("Record")


CHECKS = {
    "config": "config.json exists and can be read",
    "layout": "every file has a path that the registry format allows",
    "namespace": "every owner in the index has a readable namespace file that names that owner",
    "index-line": "every line of the index is a release of the environment its file is named for",
    "version-once": "no version is published twice, however it is spelled",
    "published-at": "releases were published in the order of their lines, and not in the future",
    "requirement": "requirements of a release come from the package index, never from a URL",
    "unique-name": "no two environments have the same distribution and module",
    "reserved-name": "no environment, bare name or owner has a reserved name",
    "alias": "every bare name points to an environment in the index",
    "artifact": "wheels in the tree have the size and digest that their release records",
    "wheel": "wheels in the tree hold one environment and match their release",
    "removed": (
        "removed.toml, if it exists, names releases with reasons that are gone, or yanked and "
        "without a wheel"
    ),
    "status": "every status file can be read and names only versions that were published",
    "schema": "schema/, if it exists, is what `telescope hub schemas` writes",
    "history": "index files only grew, in every commit and in the working tree",
    "alias-history": "no bare name was removed or given to another environment",
}
"""Id of a check -> the invariant that it checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFinding:
    """One error."""

    check: str
    """A key of `CHECKS`."""
    where: str
    """`path` or `path:line`, relative to the registry; names the commit for a past change."""
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The outcome of a check of a registry."""

    registry: str
    num_environments: int
    num_releases: int
    num_commits: int
    """Commits that changed the index or the bare names."""
    findings: list[TreeFinding]
    unchecked: list[str] = field(default_factory=list[str])
    """Keys of `CHECKS` that could not run here."""
    notes: list[str] = field(default_factory=list[str])
    """Reasons why checks could not run, or ran only in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLine:
    """A release and its position in the index."""

    release: Release
    path: str
    line: int

    @property
    def where(self) -> str:
        """`path:line`."""
        return f"{self.path}:{self.line}"


@dataclass(slots=True, kw_only=True)
class Tree:
    """The records read from a registry, and findings for those that cannot be read."""

    root: Path
    paths: list[str]
    read: Callable[[str], bytes]
    config: RegistryConfig | None = None
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    removals: Removals = field(default_factory=Removals)
    yanked: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Environment id -> its yanked versions."""
    releases: dict[str, list[IndexLine]] = field(default_factory=dict[str, list[IndexLine]])
    """Environment id -> its index lines, in the order of the file."""
    findings: list[TreeFinding] = field(default_factory=list[TreeFinding])

    def bytes_of(self, path: str) -> bytes:
        """Return the bytes of a file; empty if there is none, or none that can be read."""
        if path not in self.paths:
            return b""
        try:
            return self.read(path)
        except OSError as error:
            if not any(one.where == path for one in self.findings):
                self.add("layout", path, f"cannot be read: {error.strerror}", _RESTORE)
            return b""

    def add(self, check: str, where: str, what: str, fix: str) -> None:
        """Add a finding."""
        self.findings.append(TreeFinding(check=check, where=where, what=what, fix=fix))

    def parsed(self, check: str, where: str, parse: Callable[[], Record]) -> Record | None:
        """Return the result of `parse`; if it raises RegistryError, add a finding instead."""
        try:
            return parse()
        except RegistryError as error:
            what = str(error).removeprefix(f"{where}: ").removesuffix("; update the registry")
            self.add(check, where, what, _RESTORE)
            return None


def read_tree(root: Path, *, now: datetime, files: Listing | None = None) -> Tree:
    """Read every file of the registry at `root`, or of `files`, and validate it with its model."""
    files = files or folder_listing(root)
    tree = Tree(root=root, paths=files.paths, read=files.read)
    for path in tree.paths:
        if not _LAYOUT.fullmatch(path):
            tree.add("layout", path, "is not a registry file", "move it elsewhere")
    config = tree.bytes_of("config.json")
    tree.config = tree.parsed(
        "config", "config.json", lambda: parse_record(RegistryConfig, config, "config.json")
    )
    if "aliases.toml" in tree.paths:
        data = tree.bytes_of("aliases.toml")
        found = tree.parsed("alias", "aliases.toml", lambda: parse_aliases(data, "aliases.toml"))
        tree.aliases = found.aliases if found else {}
    if REMOVED_PATH in tree.paths:
        removed = tree.bytes_of(REMOVED_PATH)
        found_removals = tree.parsed("removed", REMOVED_PATH, lambda: parse_removals(removed))
        tree.removals = found_removals or Removals()
    for path in tree.paths:
        if _LAYOUT.fullmatch(path) and path.startswith("index/"):
            _read_index(tree, path, now=now)
    _check_namespaces(tree)
    _check_statuses(tree)
    _check_schemas(tree)
    return tree


def _read_index(tree: Tree, path: str, *, now: datetime) -> None:
    environment_id = path.removeprefix("index/").removesuffix(".jsonl")
    lines = tree.bytes_of(path).split(b"\n")
    if lines.pop():
        tree.add("index-line", f"{path}:{len(lines) + 1}", "the last line has no newline", _RESTORE)
    if not lines:
        tree.add("index-line", path, "contains no release", _RESTORE)
    found: list[IndexLine] = []
    for number, text in enumerate(lines, 1):
        where = f"{path}:{number}"
        release = tree.parsed(
            "index-line", where, lambda t=text, w=where: parse_record(Release, t, w)
        )
        if release is None:
            continue
        if release.id != environment_id:
            tree.add("index-line", where, f"contains a release of {release.id}", _RESTORE)
        found.append(IndexLine(release=release, path=path, line=number))
    tree.releases[environment_id] = found
    _check_versions(tree, found)
    _check_times(tree, found, now=now)


def _check_versions(tree: Tree, lines: Sequence[IndexLine]) -> None:
    for position, first in repeated_versions([line.release.version for line in lines]).items():
        line = lines[position]
        if position != first:
            tree.add(
                "version-once",
                line.where,
                f"{line.release.version} is published twice, so that no client takes either; it is "
                f"already on line {lines[first].line}",
                "remove the line before committing it, and raise the version instead",
            )


def _check_times(tree: Tree, lines: Sequence[IndexLine], *, now: datetime) -> None:
    fix = "correct the publisher's clock, and correct the line before committing it"
    for before, line in zip([None, *lines], lines, strict=False):
        time = line.release.published_at
        if time > now + _CLOCK_SKEW:
            tree.add(
                "published-at",
                line.where,
                f"published at {time.isoformat()}, which is in the future",
                fix,
            )
        if before is not None and time < before.release.published_at - _CLOCK_SKEW:
            what = f"published at {time.isoformat()}, before the line above it"
            tree.add("published-at", line.where, what, fix)


def _check_namespaces(tree: Tree) -> None:
    for path in tree.paths:
        if path.startswith("namespaces/") and _LAYOUT.fullmatch(path):
            data = tree.bytes_of(path)
            found = tree.parsed("namespace", path, lambda d=data, p=path: parse_namespace(d, p))
            if found is not None and path != f"namespaces/{found.owner}.toml":
                what = f"belongs to owner {found.owner!r}"
                tree.add("namespace", path, what, f"rename it to {found.owner}.toml")
    for owner in sorted({name.partition("/")[0] for name in tree.releases}):
        if f"namespaces/{owner}.toml" not in tree.paths:
            tree.add(
                "namespace",
                f"index/{owner}/",
                f"nobody owns {owner!r}: there is no namespaces/{owner}.toml",
                f"write namespaces/{owner}.toml, or remove the folder before committing it",
            )


def _check_statuses(tree: Tree) -> None:
    for path in tree.paths:
        if not path.startswith("status/") or not _LAYOUT.fullmatch(path):
            continue
        data = tree.bytes_of(path)
        status = tree.parsed("status", path, lambda d=data, p=path: parse_status(d, p))
        environment_id = path.removeprefix("status/").removesuffix(".json")
        if environment_id not in tree.releases:
            tree.add("status", path, f"{environment_id} has no index file", "remove it")
            continue
        published = {line.release.version for line in tree.releases[environment_id]}
        tree.yanked[environment_id] = set(status.yanked) if status else set()
        # Some were published, though no line of the index is a release of them.
        index = f"index/{environment_id}.jsonl"
        unreadable = read_releases(tree.bytes_of(index), environment_id, index).unreadable
        gone = {one.version for one in tree.removals.removed if one.id == environment_id}
        gone |= {line.version for line in unreadable}
        for version in sorted(tree.yanked[environment_id] - published - gone):
            tree.add(
                "status",
                path,
                f"yanks {version}, which is not published",
                f"name a published one: {', '.join(sorted(published))}",
            )


def _check_schemas(tree: Tree) -> None:
    here = {path for path in tree.paths if path.startswith("schema/")}
    wanted = {f"schema/{name}": text for name, text in schema_files().items()} if here else {}
    for path in sorted(here | set(wanted)):
        if path not in wanted or tree.bytes_of(path) != wanted[path].encode():
            what = "does not match the schema that this version generates"
            tree.add("schema", path, what, f"run: telescope hub schemas {tree.root}")


def check_names(tree: Tree) -> None:
    """Add errors in the names of owners, environments, aliases and requirements."""
    _check_same_names(tree)
    _check_reserved_names(tree)
    removed = {one.id for one in tree.removals.removed}
    for alias, environment_id in tree.aliases.items():
        if environment_id not in {*tree.releases, *removed}:
            what = f"{alias!r} points to {environment_id!r}, which is not in the index"
            fix = "correct the name, or publish that environment first"
            tree.add("alias", "aliases.toml", what, fix)
    for line in (line for lines in tree.releases.values() for line in lines):
        for name, wanted, got in misnamed(line.release):
            tree.add("index-line", line.where, f"{name} is {got!r}, not {wanted!r}", _RESTORE)
        for text in line.release.requires_dist:
            if problem := _problem(text):
                fix = "publish a new version without it, and yank this one"
                tree.add("requirement", line.where, f"requires {text!r}: {problem}", fix)


def _check_same_names(tree: Tree) -> None:
    seen: dict[str, str] = {}
    for environment_id in tree.releases:
        distribution = canonicalize_name(distribution_name(*environment_id.split("/")))
        first = seen.setdefault(distribution, environment_id)
        if first != environment_id:
            what = f"has the distribution name {distribution}, which {first} has as well"
            fix = "publish the later one under another name"
            tree.add("unique-name", f"index/{environment_id}.jsonl", what, fix)


def _check_reserved_names(tree: Tree) -> None:
    if tree.config is None:
        return  # without the config it is unknown which owner is the registry's own
    used = [(f"index/{name}.jsonl", part) for name in tree.releases for part in name.split("/")]
    used += [("aliases.toml", alias) for alias in tree.aliases]
    reserved = {*reserved_parts(tree.bytes_of, *(name for _, name in used))}
    for where, name in dict.fromkeys(used):
        if name in reserved:
            fix = "choose another name, or remove it from reserved.txt if it may be used"
            tree.add("reserved-name", where, f"{name!r} is a reserved name", fix)


def _problem(text: str) -> str:
    try:
        requirement = Requirement(text)
    except (ValueError, RecursionError):
        return "not a valid requirement (PEP 508)"
    if requirement.url:
        return "a URL, not a package from the package index"
    if canonicalize_name(requirement.name).startswith("telescope-env-"):
        return "another environment, which is not in the package index"
    return ""
