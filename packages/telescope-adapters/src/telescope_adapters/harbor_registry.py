"""Datasets of Harbor tasks by name and version, as a `registry.json` lists them.

A dataset is fetched with git once and kept in the cache, so that workers need neither the registry
nor a network. Task folders are `harbor_tasks`'.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, TypeAdapter, ValidationError

from telescope_core.base.errors import ConfigError, unknown_name

_DIGITS = 16
_READ_S = 60.0
_GIT_S = 1800.0
_MOST_BYTES = 64 << 20
_PROTOCOLS = "https:http:ssh:git:file"
_COMMIT = re.compile(r"[0-9A-Za-z][\w./-]*")


class _Task(BaseModel):
    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class _Dataset(BaseModel):
    name: str
    version: str
    tasks: list[_Task]


_DATASETS = TypeAdapter(list[_Dataset])


def dataset_folder(registry: str, dataset: str) -> Path:
    """Return the folder of the tasks of `dataset`, NAME@VERSION, fetching them the first time.

    `registry` is a file or an http address. Raises ConfigError for what is not in it, and for a
    repository that cannot be fetched.
    """
    is_remote = registry.startswith(("http://", "https://"))
    # A file may be changed by who wrote it; what lies at an address keeps its versions.
    text = b"" if is_remote else _content(registry, is_remote=False)
    digest = hashlib.sha256(b"\0".join((registry.encode(), dataset.encode(), text))).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "telescope", "harbor")
    short = re.sub(r"[^\w.-]+", "-", dataset)
    folder = cache / f"{short}-{digest[:_DIGITS]}"
    if folder.is_dir():
        return folder
    tasks = _tasks_of(registry, text or _content(registry, is_remote=is_remote), dataset)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch, "tasks")
        made.mkdir()
        for place in dict.fromkeys((task.git_url, task.git_commit_id) for task in tasks):
            chosen = [task for task in tasks if (task.git_url, task.git_commit_id) == place]
            url, commit = place
            if url is not None:
                _fetch(url, commit or "HEAD", chosen, Path(scratch, "repository"), made)
                continue
            if is_remote:
                raise ConfigError(
                    f"{registry}: {chosen[0].name} of {dataset} has no git_url, so it is a folder "
                    "of the machine that serves the registry"
                )
            for task in chosen:
                given = Path(registry).parent / Path(task.path).expanduser()
                _require_task(given, task, registry)
                os.symlink(given.resolve(), made / _folder_name(task))
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster.
            if not folder.is_dir():
                raise
    return folder


def _content(registry: str, *, is_remote: bool) -> bytes:
    try:
        if not is_remote:
            return Path(registry).read_bytes()
        with urllib.request.urlopen(registry, timeout=_READ_S) as answer:
            return answer.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"env.registry {registry!r} cannot be read: {error}; expected a registry.json, as a "
            "file or an address"
        ) from None


def _tasks_of(registry: str, text: bytes, dataset: str) -> list[_Task]:
    try:
        listed = _DATASETS.validate_python(json.loads(text))
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"env.registry {registry!r} is no list of datasets: {error}") from None
    known = [f"{one.name}@{one.version}" for one in listed]
    if dataset not in known:
        name = dataset.partition("@")[0]
        versions = [one for one in known if one.partition("@")[0] == name]
        if "@" not in dataset and versions:
            raise ConfigError(f"harbor:{dataset} needs a version: {', '.join(versions)}")
        raise unknown_name("dataset", dataset, versions or known, f"({registry})")
    tasks = listed[known.index(dataset)].tasks
    names = [_folder_name(task) for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{registry}: {dataset} has two tasks {twice[0]!r}")
    if not tasks:
        raise ConfigError(f"{registry}: {dataset} has no tasks")
    return tasks


def _folder_name(task: _Task) -> str:
    name = task.name.replace("/", "__")
    if name in ("", ".", ".."):
        raise ConfigError(f"a task of a registry has the name {task.name!r}")
    return name


def _fetch(url: str, commit: str, tasks: Sequence[_Task], scratch: Path, into: Path) -> None:
    """Put the folders of `tasks` from one commit of a repository below `into`."""
    for task in tasks:
        path = PurePosixPath(task.path)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"{task.name}: {task.path!r} is no path in {url}")
    if url.startswith("-") or not _COMMIT.fullmatch(commit):
        # git would take it for an option.
        raise ConfigError(f"{tasks[0].name}: {url!r} has no commit {commit!r}")
    _git(["init", "--quiet", str(scratch)], url)
    folder = ["-C", str(scratch)]
    _git([*folder, "remote", "add", "origin", url], url)
    limits = ("--quiet", "--depth=1", "--filter=blob:none")
    _git([*folder, "fetch", *limits, "origin", commit], url)
    patterns = [f"/{PurePosixPath(task.path).as_posix()}/" for task in tasks]
    _git([*folder, "sparse-checkout", "set", "--no-cone", *patterns], url)
    _git([*folder, "checkout", "--quiet", "FETCH_HEAD"], url)
    for task in tasks:
        given = scratch / task.path
        _require_task(given, task, url)
        whole = given.resolve()
        if any(not path.resolve().is_relative_to(whole) for path in whole.rglob("*")):
            raise ConfigError(f"{task.name} of {url} has a link to outside of its folder")
        given.rename(into / _folder_name(task))
    shutil.rmtree(scratch)


def _require_task(folder: Path, task: _Task, place: str) -> None:
    if not (folder / "task.toml").is_file():
        raise ConfigError(f"{place} has no {task.path}/task.toml, which it names as {task.name}")


def _git(argv: Sequence[str], url: str) -> None:
    """Run git; raises ConfigError with the end of what it said."""
    variables = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": _PROTOCOLS}
    try:
        done = subprocess.run(
            ["git", *argv],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{url} cannot be fetched: {error}; is git installed?") from None
    if done.returncode:
        raise ConfigError(f"{url} cannot be fetched: {done.stderr.strip()[-500:]}")
