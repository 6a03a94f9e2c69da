"""The sources of a project for publishing: their commit, and the version.

Only `write_version` and `commit_file` change anything. Versions follow PEP 440.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import tomlkit
from packaging.version import Version
from tomlkit.exceptions import TOMLKitError

from telescope_core.base.errors import ConfigError
from telescope_envs.publish.build import git_text
from telescope_envs.records.names import check_version
from telescope_envs.records.release import Source

_SCP_LIKE = re.compile(r"(?:[^@/:]+@)?(?P<host>[^/:@]{2,}):(?P<path>[^:].*)")
_MAX_LISTED = 5


def committed_source(project: Path, *, allow_no_git: bool) -> Source:
    """Return the commit of `project`; raises ConfigError if files differ from that commit.

    Without a git repository there is no commit, which raises as well unless `allow_no_git` is set.
    """
    top = git_text(project, "rev-parse", "--show-toplevel")
    if top is None:
        if allow_no_git:
            return Source()
        raise ConfigError(
            f"{project} is not in a git repository, so nobody could tell what a release was built "
            "from; commit it to one, or give --allow-no-git"
        )
    commit = git_text(project, "rev-parse", "--verify", "HEAD")
    if commit is None:
        raise ConfigError(
            f"{project} has no commit yet; run: git add . && git commit -m 'First version'"
        )
    changed = changed_files(project)
    if changed:
        more = len(changed) - _MAX_LISTED
        listed = ", ".join(changed[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
        raise ConfigError(
            f"{project} differs from its commit: {listed}; commit these files, or add "
            "those that are not part of the project to .gitignore"
        )
    inside = project.resolve().relative_to(Path(top.rstrip("\n")).resolve()).as_posix()
    return Source(
        repository=public_address(git_text(project, "remote", "get-url", "origin") or ""),
        commit=commit.strip(),
        subdirectory="" if inside == "." else inside,
    )


def changed_files(project: Path) -> list[str]:
    """Return the files below `project` that are changed, staged or untracked."""
    # A submodule has a configuration of its own, which git would obey to say whether it changed.
    found = git_text(
        *(project, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames"),
        *("--ignore-submodules=all", "."),
    )
    if found is None:
        raise ConfigError(
            f"git cannot tell whether {project} has changed; run git status there to see why"
        )
    return sorted(entry[3:] for entry in found.split("\0") if entry)


def commit_file(project: Path, name: str, message: str) -> None:
    """Commit one changed file; raises ConfigError if git fails.

    This is the author's own git, with the hooks and the signing of their repository.
    """
    command = ["git", "-C", str(project), "commit", "--quiet", "-m", message, "--", name]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise ConfigError(
            f"git did not commit {project / name} (are user.name and user.email set? try git "
            "commit there); commit it, and run telescope env push again"
        )


def public_address(remote: str) -> str:
    """Return the https address of a git remote, without user, password, port or query.

    The result is empty for a remote that exists only on this machine.
    """
    remote = remote.strip()
    if "://" in remote:
        try:
            parts = urlsplit(remote)
        except ValueError:
            return ""
        host, path = parts.hostname or "", parts.path
    else:
        found = _SCP_LIKE.fullmatch(remote)
        host, path = (found["host"], found["path"]) if found else ("", "")
    if not host or remote.startswith("file:"):
        return ""
    return f"https://{host}/{path.strip('/').removesuffix('.git')}"


PARTS = ("major", "minor", "patch")


def bumped(current: str, bump: str) -> str:
    """Return the version after `current`; `bump` is major, minor, patch or a version.

    A pre-release that prepares the requested step leads to its final release: patch of 1.0.1rc1 is
    1.0.1, and major is 2.0.0. A post-release leads to the next number; an epoch is kept.
    """
    if bump not in PARTS:
        return check_version(_canonical(bump))
    try:
        version = Version(current)
    except ValueError:
        raise ConfigError(
            f"the version {current[:80]!r} in pyproject.toml cannot be raised, because it is not a "
            "PEP 440 version; write for instance 0.1.0"
        ) from None
    numbers = [*version.release, 0, 0][:3]
    index = PARTS.index(bump)
    is_prepared = version.is_prerelease and not any(numbers[index + 1 :])
    if not is_prepared:
        numbers[index] += 1
        numbers[index + 1 :] = [0] * (2 - index)
    epoch = f"{version.epoch}!" if version.epoch else ""
    return f"{epoch}{'.'.join(str(number) for number in numbers)}"


def require_above(version: str, known: Iterable[str], environment_id: str) -> None:
    """Raise ConfigError unless `version` is above every known version."""
    newest = max(known, key=Version, default=None)
    if newest is not None and Version(version) <= Version(newest):
        # Not `--bump patch`, which counts from the project's version and may be what was run.
        raise ConfigError(
            f"{environment_id} {version} is not above {newest}, the newest version so far; raise "
            f"it with telescope env push --bump {bumped(newest, 'patch')}"
        )


def with_version(text: str, version: str, where: str = "pyproject.toml") -> str:
    """Return the TOML `text` with a new `project.version`; all other bytes stay the same."""
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    project = cast("dict[str, Any] | None", document.get("project"))
    if project is None or not isinstance(project.get("version"), str):
        raise ConfigError(
            f"{where} has no project.version that could be raised; write it there as a string "
            "(a dynamic version must be raised where it is defined)"
        )
    project["version"] = version
    return tomlkit.dumps(document)


def write_version(pyproject: Path, version: str) -> None:
    """Write `version` into `pyproject`; line endings stay as they are."""
    text = pyproject.read_bytes().decode()
    pyproject.write_bytes(with_version(text, version, str(pyproject)).encode())


def _canonical(text: str) -> str:
    try:
        return str(Version(text))
    except ValueError:
        raise ConfigError(
            f"--bump {text!r}: expected {', '.join(PARTS)} or a version such as 0.2.0 or 1.0.0rc1"
        ) from None
