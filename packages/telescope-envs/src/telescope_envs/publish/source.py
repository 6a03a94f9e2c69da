"""Determines the source of a release: repository, commit and folder, without local changes."""

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from telescope_core.errors import ConfigError
from telescope_envs.publish.build import git_text
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
        raise ConfigError(
            f"{project} differs from its commit: {_listed(changed)}; commit these files, or add "
            "those that are not part of the project to .gitignore"
        )
    return Source(
        repository=public_address(git_text(project, "remote", "get-url", "origin") or ""),
        commit=commit.strip(),
        subdirectory=_subdirectory(project, Path(top.rstrip("\n"))),
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


def _subdirectory(project: Path, top: Path) -> str:
    inside = project.resolve().relative_to(top.resolve()).as_posix()
    return "" if inside == "." else inside


def _listed(changed: list[str]) -> str:
    more = len(changed) - _MAX_LISTED
    return ", ".join(changed[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
