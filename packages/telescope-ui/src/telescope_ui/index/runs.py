"""The runs and evals in the folders that were opened, by keys that are safe in addresses."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from telescope_core.base.errors import ConfigError, nearest, unknown_name
from telescope_core.records.files import require_utf8
from telescope_ui.base.answers import NotThereError
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import stamp_of
from telescope_ui.index.one_eval import OneEval
from telescope_ui.index.one_run import OneRun

Found = TypeVar("Found", bound=OneRun)

_DEPTH = 3
"""Most folders between an opened one and a run: runs/SWEEP/SEED/RUN."""
_MOST_FOLDERS = 20_000


class Runs:
    """Finds runs and evals, and keeps their cached data; any thread may ask."""

    def __init__(
        self,
        folders: Sequence[Path],
        database: Database,
        *,
        joined: Callable[[], Sequence[Path]] = tuple,
    ) -> None:
        """Open `folders`: each is a run or an eval, or holds some.

        `joined` returns folders that were opened since. Raises ConfigError for a folder that holds
        something else.
        """
        for folder in folders:
            require_shown(folder)
        self._own = tuple(folders)
        self._joined = joined
        self._database = database
        self._lock = Lock()
        self._known: dict[Path, OneRun] = {}
        self._keys: set[str] = set()
        self._gone: dict[str, Path] = {}
        """Folders of keys that no run has any more."""
        self.left_out: list[Path] = []
        """Links in the opened folders that were not followed by the last look."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The opened folders, each once."""
        opened = (*self._own, *self._joined())
        return tuple({os.path.realpath(one): one for one in reversed(opened)}.values())[::-1]

    def close(self) -> None:
        """Stop reading, and close the index files."""
        with self._lock:
            for run in self._known.values():
                run.close()
            self._known.clear()
            self._keys.clear()

    def all(self) -> list[OneRun]:
        """Return the present runs, in no particular order."""
        return [one for one in self.look() if not isinstance(one, OneEval)]

    def evals(self) -> list[OneEval]:
        """Return the present evals that belong to no run, in no particular order."""
        return [one for one in self.look() if isinstance(one, OneEval)]

    def get(self, key: str) -> OneRun:
        """Return a run by its key; raises NotThereError, or ConfigError if it cannot be read."""
        found = self._chosen("run", key, self.all())
        require_utf8(found.path)
        return found

    def get_eval(self, key: str) -> OneEval:
        """Return an eval that belongs to no run by its key; raises NotThereError."""
        return self._chosen("eval", key, self.evals())

    def either(self, key: str) -> OneRun:
        """Return a run or an eval by its key; raises NotThereError."""
        return self._chosen("run", key, self.look())

    def look(self) -> list[OneRun]:
        """Return the present runs and evals, in no particular order."""
        with self._lock:
            found: dict[Path, tuple[type[OneRun], Path]] = {}
            links: list[Path] = []
            for folder in self.folders:
                try:
                    looked = _below(folder)
                except OSError:
                    # A disk that does not answer for a moment has not lost its runs.
                    known = [one for one in self._known.values() if one.opened == folder]
                    found |= {one.path: (type(one), folder) for one in known}
                    continue
                found |= {path: (kind, folder) for path, kind in looked.found.items()}
                links += looked.links
            self.left_out = links
            for path in [path for path in self._known if path not in found]:
                gone = self._known.pop(path)
                self._keys.discard(gone.key)
                self._gone[gone.key] = gone.named
                gone.close()
            for path, (kind, folder) in found.items():
                if path not in self._known:
                    key = self._new_key(path.name)
                    self._known[path] = kind(key, path, folder, database=self._database)
            return list(self._known.values())

    def _chosen(self, kind: str, key: str, found: Sequence[Found]) -> Found:
        by_key = {one.key: one for one in found}
        if key in by_key:
            return by_key[key]
        gone = self._gone.get(key)
        if gone is not None:
            raise NotThereError(
                f"this {kind} is gone: {gone} was moved or removed since it was shown"
            )
        raise NotThereError(str(unknown_name(kind, key, list(by_key))))

    def _new_key(self, name: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "run"
        key, number = plain, 1
        while key in self._keys:
            number += 1
            key = f"{plain}-{number}"
        self._keys.add(key)
        return key


def _advice(folder: Path) -> str:
    """Return advice about folders: one with a similar name, or a run in `runs`."""
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


class _Looked(NamedTuple):
    found: dict[Path, type[OneRun]]
    """Resolved path of each run or eval -> which of the two it is."""
    links: list[Path]
    """Links to folders outside."""
    seen: set[Path]


def _below(folder: Path) -> _Looked:
    """Return the runs and evals in `folder` and below it, without searching inside them.

    Links to places outside are left out: a folder of somebody else could show what is private here.
    Raises OSError if the file system does not answer.
    """
    root = Path(os.path.realpath(folder))
    looked = _Looked({}, [], set())
    _walk(root, root, _DEPTH, looked)
    return looked


def _walk(root: Path, path: Path, depth: int, looked: _Looked) -> None:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        looked.links.append(path)
        return
    if real in looked.seen or len(looked.seen) >= _MOST_FOLDERS:
        return
    looked.seen.add(real)
    kind = _kind_of(real)
    if kind is not None:
        looked.found[real] = kind
        return
    if not depth:
        return
    try:
        with os.scandir(real) as entries:
            names = sorted(one.name for one in entries if one.name[0] != "." and one.is_dir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for name in names:
        _walk(root, real / name, depth - 1, looked)


def _kind_of(folder: Path) -> type[OneRun] | None:
    if stamp_of(folder / "run.json") is not None:
        return OneRun
    # Evals of early versions have results alone.
    marks = (("eval.json",), ("results.json", "rollouts.jsonl"))
    is_eval = any(all(stamp_of(folder / name) is not None for name in names) for names in marks)
    return OneEval if is_eval else None


def require_shown(folder: Path) -> None:
    """Raise ConfigError for a folder that is not empty, but has no run and no eval."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: expected a run or a folder of runs, but there is no such folder; "
            f"{_advice(folder)}"
        )
    try:
        # An empty one may get some.
        if _below(folder).found or not any(os.scandir(folder)):
            return
    except OSError:
        return
    real = Path(os.path.realpath(folder))
    around = next((one for one in real.parents if _kind_of(one) is not None), None)
    if (folder / "export.js").is_file():
        how = f"it is an export, which needs no server: open {folder / 'index.html'}"
    elif (folder / "metrics.jsonl").is_file():
        how = "it has measurements alone, as of telescope sft before run.json was written there"
    elif around is not None:
        how = f"it lies in {around}: telescope ui {around}"
    else:
        how = (
            f"it was looked for in the folders below it too, {_DEPTH} deep; name a folder that "
            "telescope train or telescope eval has written, or one above it"
        )
    raise ConfigError(f"nothing in {folder} is a run or an eval; {how}")
