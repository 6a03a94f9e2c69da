"""Check in the git history that index lines and aliases of a registry never changed.

Each commit on the first-parent history is compared with the one before it, and the working tree
with the last commit. Reading the commits takes two git calls, however long the history is.
"""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import NamedTuple

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.processes.git import reading, run_git, why_unreadable
from telescope_envs.records.files import read_file
from telescope_envs.records.reading import index_lines, parse_aliases, read_releases
from telescope_envs.records.release import Removals
from telescope_envs.rules.tree import TreeFinding

_NOTHING = b""
_NO_REPOSITORY = ("not a git repository", "must be run in a work tree")


class ReleaseChange(NamedTuple):
    """One file before and after a change, in a commit or since the last commit."""

    path: str
    old: bytes
    new: bytes
    commit: str
    """The commit that changed it; empty if the change is not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryReport:
    """The findings, and the number of commits that were compared."""

    findings: list[TreeFinding] = field(default_factory=list[TreeFinding])
    num_commits: int = 0
    notes: list[str] = field(default_factory=list[str])


def require_commit(root: Path, against: str) -> None:
    """Raise ConfigError unless `against` is a commit or branch; empty = nothing is compared."""
    if not against:
        return
    if not _is_repository(root):
        raise ConfigError(
            f"{root} is not in a git repository, so --against {against} has no meaning"
        )
    if not _succeeds(root, "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}"):
        raise ConfigError(
            f"--against {against!r} is not a commit or branch of this repository; fetch it first"
        )


def check_history(
    root: Path, *, against: str = "", removals: Removals | None = None
) -> HistoryReport:
    """Check the git history of the registry at `root`; notes say what could not be checked.

    Index lines of releases in `removals` may vanish. `against` is compared at its merge base with
    HEAD, so that commits added to it since then do not count as removed here.
    """
    require_commit(root, against)
    if not _is_repository(root):
        return HistoryReport(
            notes=["history: not checked, because this folder is not in a git repository"]
        )
    notes: list[str] = []
    if _git(root, "rev-parse", "--is-shallow-repository").strip() == b"true":
        notes.append(
            "history: checked only from where this shallow clone begins; fetch the full history"
        )
    changes = _committed(root)
    num_commits = len({change.commit for change in changes})
    if not num_commits:
        notes.append("history: not checked, because no commit contains this registry yet")
    changes += _since(root, "HEAD")
    if against:
        has_base = _succeeds(root, "merge-base", against, "HEAD")
        base = _git(root, "merge-base", against, "HEAD").decode().strip() if has_base else against
        changes += _since(root, base)
    accepted = removals or Removals()
    findings = [finding for change in changes for finding in _broken_promises(change, accepted)]
    return HistoryReport(
        findings=list(dict.fromkeys(findings)), num_commits=num_commits, notes=notes
    )


def _broken_promises(change: ReleaseChange, removals: Removals) -> Iterator[TreeFinding]:
    if change.path == "aliases.toml":
        yield from _changed_aliases(change)
    elif not change.new.startswith(change.old):
        kept = change._replace(old=_without(change, removals))
        if not kept.new.startswith(kept.old):
            yield _changed_lines(kept)


def _without(change: ReleaseChange, removals: Removals) -> bytes:
    """Return the content before the change, without the lines that were rightly removed."""
    still = {*index_lines(change.new)}
    environment_id = change.path.removeprefix("index/").removesuffix(".jsonl")

    def may_be_gone(line: bytes) -> bool:
        found = read_releases(line, environment_id, change.path).releases
        return line not in still and any(map(removals.has, found))

    return b"".join(line for line in index_lines(change.old) if not may_be_gone(line))


def _changed_lines(change: ReleaseChange) -> TreeFinding:
    old, new = change.old.splitlines(), change.new.splitlines()
    same = (a == b for a, b in zip(old, new, strict=False))
    line = next((i for i, is_same in enumerate(same) if not is_same), min(len(old), len(new)))
    if not new:
        what = "the file was removed"
    elif line < len(old) and old[line] in new:
        what = f"line {line + 1} was moved"
    elif line < len(old) and len(new) >= len(old):
        what = f"line {line + 1} was changed"
    else:
        what = f"line {line + 1} was removed"
    return TreeFinding(
        check="history",
        where=_where(change, f"{change.path}:{line + 1}"),
        what=f"{what}; index files only grow",
        fix="restore the file as it was; to withdraw a release, yank it",
    )


def _changed_aliases(change: ReleaseChange) -> Iterator[TreeFinding]:
    new = _aliases(change.new)
    for alias, environment_id in _aliases(change.old).items():
        if new.get(alias) != environment_id:
            became = f"now points to {new[alias]!r}" if alias in new else "is now missing"
            yield TreeFinding(
                check="alias-history",
                where=_where(change, change.path),
                what=f"{alias!r} pointed to {environment_id!r} and {became}",
                fix="restore it; a bare name is never given to another environment",
            )


def _aliases(data: bytes) -> dict[str, str]:
    try:
        return parse_aliases(data, "aliases.toml").aliases if data else {}
    except RegistryError:
        return {}  # an unreadable file defined no aliases; `check_tree` reports the current one


def _where(change: ReleaseChange, place: str) -> str:
    return f"{place} in commit {change.commit[:12]}" if change.commit else place


def _committed(root: Path) -> list[ReleaseChange]:
    """Return every change of the index or aliases on the first-parent history, newest first."""
    log = _git(
        *(root, "log", "--first-parent", "-m", "--raw", "-z", "--no-abbrev", "--no-renames"),
        *("--format=commit %H", "--relative", "--", "index", "aliases.toml"),
    )
    raw: list[tuple[str, str, str, str]] = []
    commit = ""
    words = iter(log.decode().replace("\n", "").split("\0"))
    for word in words:
        if word.startswith("commit "):
            commit = word.removeprefix("commit ")
        elif word.startswith(":"):
            _, _, old, new, _ = word.split(" ")
            raw.append((next(words), old, new, commit))
    blobs = _blobs(root, sorted({blob for _, old, new, _ in raw for blob in (old, new)}))
    return [ReleaseChange(path, blobs[old], blobs[new], commit) for path, old, new, commit in raw]


def _since(root: Path, commit: str) -> list[ReleaseChange]:
    """Return the index files and aliases of `commit`, each with its working-tree version."""
    if not _succeeds(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return []
    listed = _git(root, "ls-tree", "-r", "-z", commit, "--", "index", "aliases.toml").decode()
    rows = [row.split("\t", 1) for row in listed.split("\0") if row]
    blobs = _blobs(root, [about.split(" ")[2] for about, _ in rows])
    here = {path: root / path for _, path in rows}
    now = {path: read_file(at) if at.is_file() else _NOTHING for path, at in here.items()}
    return [ReleaseChange(path, blobs[about.split(" ")[2]], now[path], "") for about, path in rows]


def _blobs(root: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return blob name -> contents; a name of all zeros stands for a missing file."""
    found = dict.fromkeys(names, _NOTHING)
    wanted = [name for name in found if set(name) != {"0"}]
    output = _git(root, "cat-file", "--batch", stdin="".join(f"{n}\n" for n in wanted).encode())
    for name in wanted:
        head, _, output = output.partition(b"\n")
        if head.endswith(b" missing"):
            raise RegistryError(
                f"{root}: the repository lacks object {name}, so its history cannot be checked; "
                "clone it again, without --filter"
            )
        size = int(head.split(b" ")[2])
        found[name], output = output[:size], output[size + 1 :]
    return found


def _is_repository(root: Path) -> bool:
    if which("git") is None:
        raise RegistryError("checking the history needs git, which is not installed")
    problem = why_unreadable(root)
    if problem and not any(text in problem for text in _NO_REPOSITORY):
        raise RegistryError(f"git cannot read {root}: {problem}")
    return not problem


def _succeeds(root: Path, *arguments: str) -> bool:
    return _run(root, arguments).returncode == 0


def _git(root: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    done = _run(root, arguments, stdin)
    if done.returncode:
        raise RegistryError(f"git {arguments[0]} failed in {root}: {done.stderr.decode().strip()}")
    return done.stdout


def _run(
    root: Path, arguments: Sequence[str], stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run git in the registry, so that paths are relative to it."""
    with reading(root) as environ:
        return run_git(root, *arguments, environ=environ, given=stdin)
