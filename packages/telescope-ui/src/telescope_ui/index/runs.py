"""The runs in the folders that were opened, by keys that are safe in addresses."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from telescope_core.errors import ConfigError, nearest, unknown_name
from telescope_ui.base.answers import NotThereError
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import stamp_of
from telescope_ui.index.one_run import OneRun

_DEPTH = 3
"""Folders between an opened one and a run, at most: runs/SWEEP/SEED/RUN."""
_MOST_FOLDERS = 20_000


class Runs:
    """Finds runs and keeps what was read of them; any thread may ask."""

    def __init__(self, folders: Sequence[Path], database: Database) -> None:
        """Open `folders`: each is a run, or holds runs. Raises ConfigError for one that is none."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(
                    f"{folder}: expected a run or a folder of runs, but there is no such folder; "
                    f"{_advice(folder)}"
                )
            _require_runs(folder)
        self.folders = tuple(folders)
        self._database = database
        self._lock = Lock()
        self._known: dict[Path, OneRun] = {}
        self._keys: set[str] = set()

    def left_out(self) -> list[Path]:
        """Return the links in the opened folders that are not followed."""
        return [link for folder in self.folders for link in _below(folder, "run.json").links]

    def close(self) -> None:
        """Stop reading, and close the index files."""
        with self._lock:
            for run in self._known.values():
                run.close()
            self._known.clear()
            self._keys.clear()

    def all(self) -> list[OneRun]:
        """Return the runs that are there now, in no particular order."""
        with self._lock:
            found = {path: folder for folder in self.folders for path in self._paths(folder)}
            for path in [path for path in self._known if path not in found]:
                gone = self._known.pop(path)
                self._keys.discard(gone.key)
                gone.close()
            for path, folder in found.items():
                if path not in self._known:
                    key = self._new_key(path.name)
                    self._known[path] = OneRun(key, path, folder, database=self._database)
            return list(self._known.values())

    def get(self, key: str) -> OneRun:
        """Return a run by its key; raises NotThereError."""
        runs = {run.key: run for run in self.all()}
        if key not in runs:
            raise NotThereError(str(unknown_name("run", key, list(runs))))
        return runs[key]

    def _paths(self, folder: Path) -> list[Path]:
        try:
            return _run_paths(folder)
        except OSError:
            # A disk that does not answer for a moment has not lost its runs.
            return [path for path, run in self._known.items() if run.opened == folder]

    def _new_key(self, name: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "run"
        key, number = plain, 1
        while key in self._keys:
            number += 1
            key = f"{plain}-{number}"
        self._keys.add(key)
        return key


def _advice(folder: Path) -> str:
    """Return which folders were meant: one with a name like it, or a run in `runs`."""
    beside = {path for place in (folder.parent, Path("runs")) for path in _folders(place)}
    names = {path.name: str(path) for path in sorted(beside)}
    close = [names[name] for name in nearest(folder.name, sorted(names))]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "name one that exists, as in: telescope ui runs"


def _folders(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.is_dir() and path.name[0] != "."]
    except OSError:
        return []


def _run_paths(folder: Path) -> list[Path]:
    """Return the resolved paths of the runs in `folder` and in the folders below it.

    Links out of it are left out: a folder of somebody else could show what is private here. Raises
    OSError if the file system does not answer.
    """
    return _below(folder, "run.json").paths


class _Looked(NamedTuple):
    paths: list[Path]
    links: list[Path]
    """Those that lead out of the folder, to a folder."""
    seen: set[Path]


def _below(folder: Path, marked_by: str) -> _Looked:
    """Return the folders with the file `marked_by`, whose own folders are not looked into."""
    root = Path(os.path.realpath(folder))
    looked = _Looked([], [], set())
    _look(root, root, marked_by, _DEPTH, looked)
    return looked


def _look(root: Path, path: Path, marked_by: str, depth: int, looked: _Looked) -> None:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        looked.links.append(path)
        return
    if real in looked.seen or len(looked.seen) >= _MOST_FOLDERS:
        return
    looked.seen.add(real)
    if stamp_of(real / marked_by) is not None:
        looked.paths.append(real)
        return
    if not depth:
        return
    try:
        with os.scandir(real) as entries:
            names = sorted(one.name for one in entries if one.name[0] != "." and one.is_dir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for name in names:
        _look(root, real / name, marked_by, depth - 1, looked)


def _require_runs(folder: Path) -> None:
    """Raise ConfigError for a folder that holds evals and no run; an empty one may get some."""
    try:
        if _run_paths(folder):
            return
        evals = _below(folder, "eval.json").paths
    except OSError:
        return
    if evals:
        count = f"{len(evals)} evals" if len(evals) > 1 else "an eval"
        raise ConfigError(
            f"{folder}: expected a run or a folder of runs, and it holds {count} without a run, "
            f"which telescope ui does not show; open {evals[0] / 'report.html'}, or compare two "
            "with telescope compare"
        )
