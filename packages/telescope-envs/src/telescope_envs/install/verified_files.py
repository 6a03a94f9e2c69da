"""Comparing the files of a virtual environment with what its packages recorded at installation.

A RECORD lists a package's files with their hashes. A file that no RECORD lists must be one that an
empty virtual environment has, or byte code of a listed file. Anything else was added later.
"""

import base64
import csv
import hashlib
import io
import marshal
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from importlib.util import MAGIC_NUMBER, source_from_cache
from pathlib import Path

from telescope_envs.install.standing import Finding, FindingKind
from telescope_envs.records.files import files_below

_BYTE_CODE_HEADER = 16
_NOT_OF_PACKAGES = {"telescope.json", ".lock"}
"""Files beside the packages: the record of the installation, and the file that uv locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a RECORD."""

    package: str
    path: Path
    """Absolute, without `..`; symbolic links are not followed."""
    hash: str
    """`sha256=...`; empty for RECORD itself and for byte code."""


def recorded_files(packages: Mapping[str, Distribution]) -> Iterator[Recorded]:
    """Yield every file that the RECORDs of `packages` list."""
    for name, package in packages.items():
        text = package.read_text("RECORD") or ""
        for row in csv.reader(io.StringIO(text)):
            if len(row) == 3 and row[0]:
                path = Path(os.path.normpath(str(package.locate_file(row[0]))))
                yield Recorded(package=name, path=path, hash=row[1])


def changed_files(recorded: list[Recorded]) -> Iterator[Finding]:
    """Yield the files that are gone or have other bytes than their RECORD says."""
    for file in recorded:
        if not file.path.is_file():
            if file.hash:
                yield Finding(
                    kind=FindingKind.MISSING,
                    what=str(file.path),
                    text=f"is gone; {file.package} was installed with it",
                )
        elif file.hash and _hash(file.path, file.hash) != file.hash:
            yield Finding(
                kind=FindingKind.CHANGED,
                what=str(file.path),
                text=f"is not the file that was installed with {file.package}",
            )


def extra_files(venv: Path, recorded: list[Recorded], empty: Path) -> Iterator[Finding]:
    """Yield the files below `venv` that no package installed.

    `empty` is a virtual environment without packages; files that are the same in it belong there.
    """
    listed = {file.path for file in recorded}
    for path in files_below(venv):
        if path in listed or (path.parent == venv and path.name in _NOT_OF_PACKAGES):
            continue
        if "__pycache__" in path.parts and path.suffix == ".pyc":
            source = _source_of(path)
            if source in listed:
                continue
            text = "is byte code of a file that no package installed"
        elif _is_same(path, empty / path.relative_to(venv)):
            continue
        elif path.suffix == ".pth":
            text = "runs code at each start of Python, and no package installed it"
        else:
            text = "belongs to no installed package"
        yield Finding(kind=FindingKind.EXTRA, what=str(path), text=text)


def changed_byte_code(folder: Path) -> Iterator[Finding]:
    """Yield the byte code below `folder` that differs from what its source compiles to.

    Python runs byte code instead of the source, so changing it has the same effect as changing
    the source.
    """
    for path in files_below(folder):
        if path.suffix != ".pyc":
            continue
        source = _source_of(path)
        if source is None or not source.is_file():
            continue
        data = path.read_bytes()
        if data[:4] != MAGIC_NUMBER:
            continue  # from another version of Python, which this one does not run
        if _compiled(source) != _loaded(data):
            yield Finding(
                kind=FindingKind.CHANGED,
                what=str(path),
                text=f"is not the byte code of {source.name}; remove it",
            )


def _compiled(source: Path) -> object:
    return compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=0)


def _loaded(data: bytes) -> object:
    try:
        return marshal.loads(data[_BYTE_CODE_HEADER:])
    except (EOFError, ValueError, TypeError):
        return None


def _source_of(path: Path) -> Path | None:
    try:
        return Path(source_from_cache(str(path)))
    except ValueError:
        return None


def _is_same(path: Path, ours: Path) -> bool:
    if ours.is_symlink() or path.is_symlink():
        return ours.is_symlink() and path.is_symlink() and os.readlink(ours) == os.readlink(path)
    if not ours.is_file():
        return False
    # pyvenv.cfg may differ: it holds the folder's name and the version of uv.
    is_own_word = path.name == "pyvenv.cfg"
    return is_own_word or path.read_bytes() == ours.read_bytes()


def _hash(path: Path, like: str) -> str:
    kind = like.partition("=")[0]
    digest = hashlib.new(kind, path.read_bytes()).digest()
    return f"{kind}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
