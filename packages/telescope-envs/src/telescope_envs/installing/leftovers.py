"""Removing folders that killed runs left behind, and virtual environments out of use."""

import hashlib
import os
from pathlib import Path

from telescope_core.errors import ConfigError
from telescope_envs.filelocks import locked_if_free
from telescope_envs.home import data_folder
from telescope_envs.installed import installed_environments
from telescope_envs.installing.build import BUILDING, venv_folder, venvs_folder
from telescope_envs.installing.cache import PART, key_of, wheels_folder
from telescope_envs.lockfile import read_lock
from telescope_envs.trees import remove_tree

_REMOVING = ".removing-"


def lock_file(environment_id: str) -> Path:
    """Return the file that an installer keeps locked from the download to the activation."""
    return data_folder() / "locks" / f"{key_of(environment_id)}.lock"


def remove_leftovers() -> list[Path]:
    """Remove unfinished folders whose installer is gone; returns those that are gone now."""
    removed: list[Path] = []
    for parent, prefix in (
        (venvs_folder(), BUILDING),
        (venvs_folder(), _REMOVING),
        (wheels_folder(), PART),
    ):
        for folder in sorted(parent.glob(f"{prefix}*")):
            key = folder.name.removeprefix(prefix)
            with locked_if_free(data_folder() / "locks" / f"{key}.lock") as is_ours:
                if is_ours and remove_tree(folder):
                    removed.append(folder)
    return removed


def remember_project(lock: Path) -> None:
    """Record that the virtual environments of this telescope.lock are in use."""
    folder = data_folder() / "projects"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(str(lock).encode()).hexdigest()[:16]).write_text(f"{lock}\n")


def remove_unused_venvs(environment_id: str) -> list[Path]:
    """Remove the virtual environments of owner/name that nothing uses; returns them.

    The active one, those in a project's telescope.lock, and those of running processes are in use.
    The caller holds the lock of the environment.
    """
    in_use = {Path(found.interpreter).parents[1] for found in installed_environments()}
    in_use |= _locked_by_projects()
    removed: list[Path] = []
    for folder in sorted(venvs_folder().glob(f"{key_of(environment_id)}--*")):
        is_used = folder in in_use or _is_running(folder)
        if not is_used and remove_venv(folder, environment_id):
            removed.append(folder)
    return removed


def remove_venv(folder: Path, environment_id: str) -> bool:
    """Remove a virtual environment: rename it out of the way first, then delete its files.

    Returns whether it is out of the way; where it cannot be, all of it stays.
    """
    aside = venvs_folder() / f"{_REMOVING}{key_of(environment_id)}"
    if not remove_tree(aside):
        return False
    if folder.is_dir():
        try:
            os.rename(folder, aside)
        except OSError:
            return False
        remove_tree(aside)
    return True


def _locked_by_projects() -> set[Path]:
    """Return the virtual environments in the telescope.lock files of known projects."""
    folders: set[Path] = set()
    for note in (data_folder() / "projects").glob("*"):
        path = Path(note.read_text().rstrip("\n"))
        if not path.is_file():
            note.unlink(missing_ok=True)
            continue
        try:
            folders |= {venv_folder(one) for one in read_lock(path).environments}
        except ConfigError:  # damaged, which the next command that uses it reports
            continue
    return folders


def _is_running(folder: Path) -> bool:
    """Whether a process of this machine was started from `folder`; False without /proc."""
    start = os.fsencode(f"{folder}{os.sep}")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if process.read_bytes().startswith(start):
                return True
        except OSError:
            continue
    return False
