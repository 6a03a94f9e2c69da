"""Projects as authors have them, in git, for the tests of publishing."""

import shutil
import subprocess
from pathlib import Path

from telescope_envs.publish.push import (
    PushOptions,
    PushResult,
    push,
)
from telescope_envs.publish.scaffold import create_project

MODULE = "telescope_env_acme_sorted"
WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit_all(folder: Path, message: str = "change") -> str:
    git(folder, "add", "-A")
    git(folder, *WHO, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def new_repository(folder: Path, *, name="sorted", inside="") -> Path:
    """Return the project of acme/<name>, committed, `inside` a repository in `folder`."""
    project = folder / inside if inside else folder
    create_project(project, owner="acme", name=name, template="single-turn")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@example.org")
    commit_all(folder, "first")
    return project


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def publish(project: Path, registry: Path, **options) -> PushResult:
    return push(project, PushOptions(registry=str(registry), **{"attest": "never", **options}))


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file of `folder` that is not a store's own."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".telescope" not in path.parts
    }


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))
