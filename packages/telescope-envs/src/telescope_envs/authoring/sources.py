"""Lists and copies the files of a project that its wheel is built from.

A wheel is always built from a copy. The copy has no files that git ignores (caches, an old build
folder, secrets), and a build backend that writes beside the sources does not change the project.
"""

import os
import shutil
from pathlib import Path

from telescope_core.errors import ConfigError
from telescope_envs.git import reading, run_git

_CACHES = {".git", ".hg", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
_NOT_AT_THE_TOP = {".venv", "venv", "dist", "build", "runs", "node_modules"}
"""Folders in the project root that are omitted when the project is not in git."""


def require_project(project: Path) -> None:
    """Raise ConfigError unless `project` is a folder with a pyproject.toml."""
    if not (project / "pyproject.toml").is_file():
        lacks = "contains no pyproject.toml" if project.is_dir() else "is not a folder"
        raise ConfigError(
            f"{project} {lacks}; give the folder of an environment's project, or create one: "
            "telescope env init NAME --template single-turn"
        )


def source_files(project: Path) -> list[Path]:
    """Return the project's files, sorted, relative to it; in git, without ignored files."""
    require_project(project)
    listed = git_text(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard", ".")
    if listed is None:
        found = [path.relative_to(project) for path in _walk(project)]
    else:
        found = [Path(name) for name in listed.split("\0") if name]
    return sorted({path for path in found if (project / path).is_file()})


def copy_sources(project: Path, target: Path) -> None:
    """Copy the project's files into the folder `target`, as plain files with default modes."""
    root = project.resolve()
    for path in source_files(project):
        source = project / path
        if not source.resolve().is_relative_to(root):
            raise ConfigError(
                f"{source} is a link to a file outside the project, but a release must contain its "
                "own files; replace the link with the file"
            )
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / path)


def is_in_git(folder: Path) -> bool:
    """Whether `folder` is part of a git repository."""
    return git_text(folder, "rev-parse", "--show-toplevel") is not None


def git_text(folder: Path, *arguments: str) -> str | None:
    """Return what git reads there; None if it fails, is not installed, or `folder` is not in git.

    Nothing that the repository's configuration names is started.
    """
    try:
        with reading(folder) as environ:
            done = run_git(folder, *arguments, environ=environ)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _walk(project: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(project):
        skipped = _CACHES | _NOT_AT_THE_TOP if Path(folder) == project else _CACHES
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(folder) / name for name in files]
    return found
