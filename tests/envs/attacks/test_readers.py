"""One archive, two readers: what inspection accepts, another installer unpacks to the same files.

Every mutant is a wheel whose archive was changed where programs are known to differ. Most are
refused. Those that are not are unpacked by uv as well, and both must have the same files.
"""

import io
import platform
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import uv
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from tests.envs.projects import toy_publication

from telescope_core.errors import RegistryError
from telescope_envs.install.venv import write_wheel
from telescope_envs.rules.wheel import (
    read_wheel,
    record_hash,
)

MODULE = "telescope_env_acme_toy"
INFO = f"{MODULE}-0.1.0.dist-info"
NAME = f"{MODULE}-0.1.0-py3-none-any.whl"
LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
NUM_RANDOM = 400
OF_OTHERS = {"direct_url.json", "uv_cache.json", "REQUESTED", "INSTALLER", "RECORD"}
"""Files in which installers write down what they did."""


def toy() -> bytes:
    return toy_publication().wheel


def rebuilt(files: dict[str, bytes], *, extra: bytes = b"", order: int = 0) -> bytes:
    """Return a wheel of `files` with a fitting RECORD; each member gets the extra field `extra`."""
    files = {path: data for path, data in files.items() if not path.endswith("/RECORD")}
    lines = [f"{path},{record_hash(data)},{len(data)}\n" for path, data in files.items()]
    files[f"{INFO}/RECORD"] = ("".join(lines) + f"{INFO}/RECORD,,\n").encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files, reverse=bool(order)):
            info = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED if order else zipfile.ZIP_STORED
            info.extra = extra
            archive.writestr(info, files[path])
    return packed.getvalue()


def contents() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(toy())) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def unicode_path(name: str, shown: str) -> bytes:
    """Return Info-ZIP's extra field that gives the file `name` another name."""
    body = struct.pack("<BI", 1, zipfile.crc32(name.encode())) + shown.encode()
    return struct.pack("<2H", 0x7075, len(body)) + body


def fields_of(data: bytes, mark: bytes, size: int) -> Iterator[int]:
    """Yield the place of every byte of every header of this kind, its name excluded."""
    start = data.find(mark)
    while start >= 0:
        yield from range(start + 4, start + size)
        start = data.find(mark, start + 1)


HARMLESS_CHANGES = [
    "as it was built",
    "packed in another order",
    "a name that ends in a dot",
    "a name with a colon",
    "a decomposed name",
]
"""All that inspection accepts of them."""


def changed_on_purpose() -> Iterator[tuple[str, bytes]]:
    """Yield wheels with what programs are known to read differently."""
    files, plain = contents(), toy()
    text = f"{MODULE}/ok.txt"
    yield "as it was built", plain
    yield "packed in another order", rebuilt(files, order=1)
    for shown in ("evil.pth", f"{MODULE}-0.1.0.data/scripts/git", f"{MODULE}/other.py"):
        with_text = {**files, text: b"x"}
        yield f"also called {shown}", rebuilt(with_text, extra=unicode_path(text, shown))
    yield "with an unknown extra field", rebuilt(files, extra=struct.pack("<2H", 0x9999, 0))
    yield "with a time of its own", rebuilt(files, extra=struct.pack("<2HBI", 0x5455, 5, 1, 0))
    entry = f"[telescope.environments]\ntoy = {MODULE}:Toy\n"
    for name, points in {
        "carriage return": entry + f"x = y\r[console_scripts]\rtelescope = {MODULE}:main\n",
        "only carriage returns": entry.replace("\n", "\r"),
        "form feed": entry + f"\x0c[console_scripts]\x0ctelescope = {MODULE}:main\n",
        "line separator": entry + f"\u2028[console_scripts]\u2028telescope = {MODULE}:main\n",
        "continued line": entry + f"  [console_scripts]\n  telescope = {MODULE}:main\n",
        "comment": entry + f"# \r[console_scripts]\rt = {MODULE}:main\n",
        "twice": entry + entry,
    }.items():
        yield name, rebuilt({**files, f"{INFO}/entry_points.txt": points.encode()})
    deep = f"{MODULE}/" + "a/" * 1500 + "x.py"
    yield "1,500 folders deep", rebuilt({**files, deep: b""})
    yield "a long name", rebuilt({**files, f"{MODULE}/{'n' * 250}.py": b""})
    for name, path in {
        "the same name in capitals": f"{MODULE}/__INIT__.py",
        "a name that ends in a dot": f"{MODULE}/x.",
        "a name with a backslash": f"{MODULE}\\x.py",
        "a name with a colon": f"{MODULE}/x:y.py",
        "a decomposed name": f"{MODULE}/e\u0301.py",
    }.items():
        yield name, rebuilt({**files, path: b"x"})
    first_version = plain[:4] + b"\xff" + plain[5:]
    yield "a version that only the header before the file needs", first_version
    yield "bytes before", b"#!/bin/sh\n" + plain
    yield "bytes after", plain + b"\n"
    yield "an archive after an archive", rebuilt({**files, text: b"x"}) + plain


def changed_at_random() -> Iterator[tuple[str, bytes]]:
    """Yield wheels with one or two bytes changed in the headers of their archive."""
    plain, chance = toy(), random.Random(0)
    places = [
        *fields_of(plain, LOCAL, 30),
        *fields_of(plain, CENTRAL, 46),
        *fields_of(plain, END, 22),
    ]
    for number in range(NUM_RANDOM):
        changed = bytearray(plain)
        for place in chance.sample(places, chance.choice((1, 1, 2))):
            changed[place] = chance.choice((0, 1, 8, 0x20, 0x80, 0xFF, changed[place] ^ 1))
        yield f"changed headers {number}", bytes(changed)


HEADER = "Metadata-Version: 2.4\nName: telescope-env-acme-toy\nVersion: 0.1.0\n"
METADATA = {
    "no version of the format": HEADER.partition("\n")[2],
    "an unknown version of the format": HEADER.replace("2.4", "9.9"),
    "a version of the format that is none": HEADER.replace("2.4", "two"),
    "two versions of the format": f"Metadata-Version: 2.1\n{HEADER}",
    "no name": HEADER.replace("Name:", "Title:"),
    "two names": f"{HEADER}Name: other\n",
    "two versions": f"{HEADER}Version: 0.2.0\n",
    "a range of Python that is none": f"{HEADER}Requires-Python: banana\n",
    "a range of Python that begins with a comma": f"{HEADER}Requires-Python: ,>=3.11\n",
    "a range of Python that ends with a comma": f"{HEADER}Requires-Python: >=3.11,\n",
    "an exact Python that is none": f"{HEADER}Requires-Python: ===banana\n",
    "two ranges of Python": f"{HEADER}Requires-Python: >=3.11\nRequires-Python: >=3.99\n",
    "a requirement that is none": f"{HEADER}Requires-Dist: >=1 what\n",
    "a requirement whose name ends in a line": f"{HEADER}Requires-Dist: x_\n",
    "a requirement whose extra ends in a dot": f"{HEADER}Requires-Dist: x[y.]\n",
    "a requirement of an address": f"{HEADER}Requires-Dist: x @ https://x.test/x.whl\n",
    "a marker that is none": f"{HEADER}Requires-Dist: x; moon == 'full'\n",
    "a requirement on two lines": f"{HEADER}Requires-Dist: x;\n python_version > '3'\n",
    "a line in the middle": f"{HEADER}\nRequires-Python: >=3.99\n",
    "carriage returns": HEADER.replace("\n", "\r"),
    "both ends of a line": HEADER.replace("\n", "\r\n"),
    "an extra that is none": f"{HEADER}Provides-Extra: -x-\n",
    "a field of its own": f"{HEADER}Moon: full\n",
    "nothing": "",
}
PURE = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
WHEEL = {
    "a later version": PURE.replace("1.0", "9.0"),
    "a later minor version": PURE.replace("1.0", "1.9"),
    "a version that is none": PURE.replace("1.0", "one"),
    "no version": PURE.partition("\n")[2],
    "two versions": f"Wheel-Version: 9.0\n{PURE}",
    "not pure": PURE.replace("true", "false"),
    "both pure and not": f"{PURE}Root-Is-Purelib: false\n",
    "pure in capitals": PURE.replace("true", "True"),
    "another tag": PURE.replace("py3-none-any", "cp311-cp311-linux_x86_64"),
    "carriage returns": PURE.replace("\n", "\r"),
    "a continued line": PURE.replace("Tag", " Tag"),
    "a line without a field": f"{PURE}pure\n",
    "a build number": f"{PURE}Build: 1\n",
    "nothing": "",
}


HARMLESS_TEXTS = [
    "METADATA: a line in the middle",
    "METADATA: both ends of a line",
    "METADATA: a field of its own",
    "WHEEL: a build number",
]
"""All that inspection accepts of them."""


def texts_about_itself() -> Iterator[tuple[str, bytes]]:
    """Yield wheels whose own METADATA or WHEEL installers may refuse, or read differently."""
    files = contents()
    for name, cases in (("METADATA", METADATA), ("WHEEL", WHEEL)):
        for what, text in cases.items():
            yield f"{name}: {what}", rebuilt({**files, f"{INFO}/{name}": text.encode()})
    yield (
        "METADATA: not UTF-8",
        rebuilt({**files, f"{INFO}/METADATA": HEADER.encode() + b"A: \xff"}),
    )


def random_texts_about_itself() -> Iterator[tuple[str, bytes]]:
    """Yield wheels with a few letters of their METADATA or WHEEL changed."""
    files, chance = contents(), random.Random(0)
    own = {name: files[f"{INFO}/{name}"] for name in ("METADATA", "WHEEL")}
    for number in range(NUM_RANDOM // 2):
        name = chance.choice(("METADATA", "WHEEL"))
        changed = bytearray(own[name])
        for _ in range(chance.choice((1, 1, 3))):
            place = chance.randrange(len(changed))
            letter = chance.choice(b" \n\r\t\0:;,.<=>019azZ-_\xc3\xff")
            if chance.random() < 0.5:
                changed[place] = letter
            elif chance.random() < 0.5:
                changed.insert(place, letter)
            else:
                del changed[place]
        yield (
            f"changed {name} {number}: {bytes(changed)!r}",
            rebuilt({**files, f"{INFO}/{name}": bytes(changed)}),
        )


def accepted_and_unpacked_alike(
    wheels: Iterable[tuple[str, bytes]], tmp_path: Path, *, known: Iterable[bytes] = ()
) -> list[str]:
    """Return the names of what inspection accepts, after both have unpacked it to the same files.

    Equal archives are unpacked once, and `known` ones not at all.
    """
    seen, accepted = set(known), []
    for name, data in wheels:
        if data in seen or not is_accepted(data):
            continue
        seen.add(data)
        accepted.append(name)
        folder = tmp_path / str(len(accepted))
        folder.mkdir()
        assert unpacked_by_us(data, folder) == unpacked_by_uv(data, folder), name
    return accepted


@pytest.mark.slow
def test_what_a_wheel_says_of_itself_is_taken_by_other_installers_too(tmp_path: Path) -> None:
    assert accepted_and_unpacked_alike(texts_about_itself(), tmp_path) == HARMLESS_TEXTS


@pytest.mark.slow
def test_and_so_is_what_it_says_with_letters_changed(tmp_path: Path) -> None:
    known = [data for _, data in texts_about_itself()]
    assert accepted_and_unpacked_alike(random_texts_about_itself(), tmp_path, known=known)


def unpacked_by_uv(data: bytes, folder: Path) -> dict[str, bytes]:
    wheel = folder / NAME
    wheel.write_bytes(data)
    target = folder / "uv"
    done = subprocess.run(
        [
            *(uv.find_uv_bin(), "pip", "install", "--no-deps", "--no-index", "--offline"),
            *("--no-config", "--no-cache", "--python", sys.executable, "--target", str(target)),
            str(wheel),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return read_files(target)


def unpacked_by_us(data: bytes, folder: Path) -> dict[str, bytes]:
    write_wheel(read_wheel(data, NAME), folder / "ours")
    return read_files(folder / "ours")


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in OF_OTHERS and path.name != ".lock"
    }


def is_accepted(data: bytes) -> bool:
    """Whether inspection takes it and it is for this Python, without which nobody unpacks it."""
    try:
        wheel = read_wheel(data, NAME)
    except RegistryError:
        return False
    return platform.python_version() in SpecifierSet(wheel.requires_python)


@pytest.mark.slow
def test_what_inspection_accepts_is_unpacked_to_the_same_files(tmp_path: Path) -> None:
    assert accepted_and_unpacked_alike(changed_on_purpose(), tmp_path) == HARMLESS_CHANGES


@pytest.mark.slow
def test_and_so_is_what_it_accepts_with_bytes_changed(tmp_path: Path) -> None:
    accepted = accepted_and_unpacked_alike(changed_at_random(), tmp_path, known=[toy()])
    assert 0 < len(accepted) < NUM_RANDOM / 8, "most changes of a header are refused"


NAMES = st.sampled_from(["a", "A", "b.py", "e\u0301", "\u00e9", "n" * 200, "INSTALLER"])
PATHS = st.builds(
    lambda top, names: "/".join((top, *names)),
    st.sampled_from([MODULE, INFO]),
    st.lists(NAMES, min_size=1, max_size=3) | st.lists(NAMES, min_size=28, max_size=31),
)


@pytest.mark.slow
@given(st.lists(PATHS, max_size=4, unique=True))
@example([f"{MODULE}/a", f"{MODULE}/a/b.py"])
@example([f"{MODULE}/\u00e9", f"{MODULE}/e\u0301/b.py"])
@example([f"{MODULE}/A/b.py", f"{MODULE}/a"])
@example([f"{INFO}/INSTALLER/b.py"])
@example([f"{MODULE}/" + "/".join(["n" * 200] * 30)])
def test_whatever_paths_inspection_accepts_an_install_writes(tmp_path_factory, paths) -> None:
    files = {**contents(), **{path: path.encode() for path in paths}}
    try:
        wheel = read_wheel(rebuilt(files), NAME)
    except RegistryError:
        return
    folder = tmp_path_factory.mktemp("site-packages")
    write_wheel(wheel, folder)
    assert read_files(folder) == {
        path: data for path, data in files.items() if Path(path).name not in OF_OTHERS
    }


def test_a_file_that_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / MODULE).mkdir()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / MODULE / "__init__.py").symlink_to(elsewhere)
    with pytest.raises(Exception, match="is there already"):
        write_wheel(read_wheel(toy(), NAME), tmp_path)
    assert not elsewhere.exists()
    assert [path.name for path in tmp_path.iterdir()] == [MODULE]
