"""Size and SHA-256 of files, to check later that each is still what was written.

Comparing sizes is free and finds files that were cut or lost. Reading contents, at about 1 GB/s,
finds everything else: a flipped bit, or a file from another folder.
"""

import hashlib
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ConfigDict

SUMS = "SHA256SUMS"
"""File of the checksums of a folder that others take away, as the program `sha256sum` reads it."""
_CHUNK_BYTES = 4 * 2**20
_WHOLE_BYTES = 64 * 2**20
"""Files up to this size are read as a whole by `quick_digest`."""
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 64 * 1024


class FileProof(BaseModel):
    """Size and digest of one file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bytes: int
    sha256: str
    """64 hexadecimal digits."""


def proof_of(path: Path, moved: Callable[[], None] | None = None) -> FileProof:
    """Read the file `path` and return its proof; `moved` is called for every 4 MiB."""
    digest, size, chunk = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            digest.update(chunk[:count])
            size += count
            if moved is not None:
                moved()
    return FileProof(num_bytes=size, sha256=digest.hexdigest())


def proofs_of(folder: Path, known: Mapping[str, FileProof]) -> dict[str, FileProof]:
    """Return the proof of every file below `folder` by its path there, parts divided by `/`.

    Those in `known` are not read again.
    """
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {name: known.get(name) or proof_of(folder / name) for name in names}


def wrong_sizes(folder: Path, proofs: Mapping[str, FileProof]) -> list[str]:
    """Return one line for each file of `proofs` that is missing or has another size."""
    found: list[str] = []
    for name, proof in proofs.items():
        # Asked once: the file may be removed meanwhile.
        try:
            facts = (folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            facts = None
        if facts is None or not stat.S_ISREG(facts.st_mode):
            found.append(f"{name} is missing")
        elif facts.st_size != proof.num_bytes:
            found.append(f"{name} has {facts.st_size} bytes and was written with {proof.num_bytes}")
    return found


def wrong_contents(
    folder: Path,
    proofs: Mapping[str, FileProof],
    names: Iterable[str],
    moved: Callable[[], None] | None = None,
) -> list[str]:
    """Read the files `names` and return one line for each that is not what was written."""
    found: list[str] = []
    for name in names:
        found += (wrong := wrong_sizes(folder, {name: proofs[name]}))
        if wrong:
            continue
        try:
            now = proof_of(folder / name, moved)
        except FileNotFoundError:  # removed since its size was asked
            found.append(f"{name} is missing")
            continue
        if now != proofs[name]:
            found.append(
                f"{name} is not what was written: its SHA-256 is {now.sha256[:12]}..., and was "
                f"{proofs[name].sha256[:12]}..."
            )
    return found


def wrong_in_parallel(folder: Path, proofs: Mapping[str, FileProof]) -> list[str]:
    """Do the same as `wrong_contents` for all files, with one thread per processor."""

    def look(name: str) -> list[str]:
        return wrong_contents(folder, proofs, [name])

    with ThreadPoolExecutor() as pool:
        return list(chain.from_iterable(pool.map(look, proofs)))


def write_sums(folder: Path, pattern: str, moved: Callable[[], None] | None = None) -> None:
    """Write the checksums of the files below `folder` with names like `pattern` into it."""
    paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
    lines = [f"{proof_of(one, moved).sha256}  {one.relative_to(folder)}\n" for one in paths]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def wrong_sums(folder: Path) -> list[str]:
    """Return one line for each file that is not what `SHA256SUMS` in `folder` says.

    None without that file. Raises ValueError if it cannot be read as such.
    """
    path = folder / SUMS
    if not path.is_file():
        return []
    named: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if found is None:
            raise ValueError(f"{path}: {line[:80]!r} is not a checksum and the name of a file")
        named[found[2]] = found[1]

    def look(name: str) -> str | None:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if proof_of(folder / name).sha256 != named[name]:
            return f"{name} is not what was written"
        return None

    with ThreadPoolExecutor() as pool:
        return [line for line in pool.map(look, named) if line is not None]


def quick_digest(path: Path) -> str:
    """Return a digest of a file in at most a tenth of a second; large files are sampled.

    For more than 64 MiB, it is the SHA-256 of the size and of 256 parts of 64 KiB from the first to
    the last byte. Retrained weights or rewritten rows differ in all parts; a single bit may be in
    none.
    """
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return proof_of(path).sha256
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for number in range(_NUM_SAMPLES):
            stream.seek(number * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
