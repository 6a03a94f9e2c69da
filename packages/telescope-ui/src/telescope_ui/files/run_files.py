"""Readable files of a run folder: regular files inside it, whatever their names.

Anyone who can write into a run folder can put links into it, so every path is resolved first.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from telescope_core.base.terminal import whole
from telescope_core.records.files import read_json
from telescope_core.records.step_files import StepPart, merged_path, part_in, step_path
from telescope_ui.base.answers import NotThereError

MAX_JSON_BYTES = 32 * 2**20
"""Largest JSON file that is read as a whole."""


class Stamp(NamedTuple):
    """Size, time and number of a file, which change with its content."""

    size: int
    mtime_ns: int
    inode: int


class Listed(NamedTuple):
    """A file of a run folder."""

    name: str
    folder: Path
    stamp: Stamp

    @property
    def path(self) -> Path:
        """Path of the file; computed only for files that are opened, as there are thousands."""
        return self.folder / self.name


def inside(root: Path, *parts: str) -> Path | None:
    """Return the path of `parts` in `root`; None if there is nothing, or if it leads outside.

    `root` must be resolved.
    """
    if any("\0" in part for part in parts):
        return None
    path = root.joinpath(*parts)
    real = os.path.realpath(path)
    if real != str(path) and not real.startswith(f"{root}{os.sep}"):
        return None
    return path if os.path.exists(real) else None


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a regular file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _stamp(found) if stat.S_ISREG(found.st_mode) else None


def stamp_in(stream: IO[bytes]) -> Stamp:
    """Return the stamp of an opened file."""
    return _stamp(os.fstat(stream.fileno()))


def stamp_of_folder(root: Path, name: str) -> Stamp | None:
    """Return the stamp of a folder of `root`; None if there is none, or if it leads outside."""
    path = inside(root, name)
    try:
        return None if path is None else _stamp(path.stat())
    except OSError:
        return None


def listed(root: Path, *parts: str, suffixes: tuple[str, ...]) -> list[Listed]:
    """Return the regular files with one of `suffixes` in a folder of `root`, sorted by name.

    Links are left out, and so are names that begin with a dot. A folder that is gone is empty.
    Raises OSError if the file system does not answer.
    """
    folder = inside(root, *parts)
    found: list[Listed] = []
    for entry in _entries(folder):
        if entry.name.startswith(".") or not entry.name.endswith(suffixes):
            continue
        try:
            if folder is not None and entry.is_file(follow_symlinks=False):
                stamp = _stamp(entry.stat(follow_symlinks=False))
                found.append(Listed(entry.name, folder, stamp))
        except FileNotFoundError:
            continue
    return sorted(found)


def named(root: Path, *parts: str, names: Iterable[str]) -> list[Listed]:
    """Return the regular files in a folder of `root` that have one of `names`, without a listing.

    Links are left out, as in `listed`. Raises OSError if the file system does not answer.
    """
    folder = inside(root, *parts)
    found: list[Listed] = []
    for path in [] if folder is None else [folder / name for name in names]:
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(Listed(path.name, path.parent, _stamp(status)))
    return found


def folders(root: Path, *parts: str) -> list[Path]:
    """Return the folders in a folder of `root`, sorted by name, without links and hidden ones."""
    folder = inside(root, *parts)
    if folder is None:
        return []
    names = [
        entry.name
        for entry in _entries(folder)
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
    ]
    return [folder / name for name in sorted(names)]


def _entries(folder: Path | None) -> list[os.DirEntry[str]]:
    """Return the entries of a folder whose names are UTF-8, as ours are; empty if it has gone."""
    if folder is None:
        return []
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if whole(entry.name) == entry.name]
    except (FileNotFoundError, NotADirectoryError):
        return []


def object_in(root: Path, *parts: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of `root`; None without one.

    Raises NotThereError for a file that is too large to be read as a whole.
    """
    path = inside(root, *parts)
    stamp = None if path is None else stamp_of(path)
    if path is None or stamp is None:
        return None
    if stamp.size > MAX_JSON_BYTES:
        raise too_large("/".join(parts), stamp)
    return read_json(path)


def too_large(name: str, stamp: Stamp) -> NotThereError:
    """Return the error about a file of JSON that is too large to be read as a whole."""
    return NotThereError(
        f"{name} has {stamp.size / 2**20:,.0f} MiB, and at most "
        f"{MAX_JSON_BYTES // 2**20} are read; look at it with another program"
    )


def step_of(name: str) -> int | None:
    """Return the step in a name such as `step-000012.parquet`; None for any other name."""
    number = name.removeprefix("step-").partition(".")[0]
    return int(number) if name.startswith("step-") and number.isdecimal() else None


def step_part(root: Path, folder: str, step: int) -> StepPart | None:
    """Return the location of the rows of a step in a folder of `root`; None if there are none.

    Raises ConfigError that names a file of many steps which cannot be read.
    """
    # In this order: it is merged before the single one is deleted.
    single = inside(root, folder, step_path(root, step).name)
    if single is not None:
        return StepPart(single)
    merged = inside(root, folder, merged_path(root, step).name)
    return None if merged is None else part_in(merged, step)


def literal_paths(paths: Sequence[Path]) -> list[str]:
    """Return paths escaped so that DuckDB sees no pattern in them."""
    special = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})
    return [str(path).translate(special) for path in paths]


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
