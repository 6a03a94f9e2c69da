"""Folders of any depth: finding their files, and removing them.

Nothing here recurses, and removing builds no long paths. What a wheel or a killed program left may
be deeper than Python's stack, and its paths longer than the system takes.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

_MOVED = ".moved-"


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, in order within each folder; links are not followed."""
    pending = [folder]
    while pending:
        here = pending.pop()
        with os.scandir(here) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            else:
                yield Path(entry.path)


def remove_tree(folder: Path) -> bool:
    """Remove a folder, a file or a link, and all below it; returns whether it is gone.

    What cannot be removed stays, without an error. Folders are first moved up to the top, so if
    this process is killed, the next call goes on with what is left there.
    """
    if folder.is_symlink() or not folder.is_dir():
        with suppress(OSError):
            folder.unlink(missing_ok=True)
        return not os.path.lexists(folder)
    numbers = count()
    pending = [folder]
    emptied: list[Path] = []
    while pending:
        here = pending.pop()
        emptied.append(here)
        for entry in _entries(here):
            if entry.is_dir(follow_symlinks=False):
                pending.append(_moved_up(Path(entry.path), folder, numbers))
            else:
                with suppress(OSError):
                    os.unlink(entry.path)
    for one in reversed(emptied):
        with suppress(OSError):
            one.rmdir()
    return not folder.exists()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in `folder`, which its owner can then change; nothing if that cannot be."""
    with suppress(OSError):
        folder.chmod(0o700)
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _moved_up(inner: Path, top: Path, numbers: "count[int]") -> Path:
    """Move a folder to the top; returns where it is now, which is where it was if it cannot be."""
    if inner.parent == top:
        return inner
    with suppress(OSError):
        inner.chmod(0o700)  # moving a folder changes it: its parent is another
    for number in numbers:
        target = top / f"{_MOVED}{number}"
        if os.path.lexists(target):
            continue
        try:
            inner.rename(target)
        except OSError:
            return inner
        return target
    raise AssertionError("there are always more numbers")
