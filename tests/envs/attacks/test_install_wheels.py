"""Wheels that would do harm: each is refused with its reason, and leaves nothing behind.

The publisher is the attacker here: the registry's record names the very bytes that it serves.
"""

import hashlib
import io
import struct
import zipfile
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_core.errors import RegistryError
from telescope_envs.install.install import install
from telescope_envs.install.steps import InstallOptions
from telescope_envs.registry import Registry
from telescope_envs.rules.wheel import read_wheel

MODULE = "telescope_env_acme_toy"
INFO = f"{MODULE}-0.1.0.dist-info"
GROUP = f"[telescope.environments]\ntoy = {MODULE}:Toy\n"


@pytest.fixture
def refused(tmp_path, registry, monkeypatch):
    """Publish these bytes as acme/toy 0.1.0, install them, and return why that was refused."""
    home = tmp_path / "home"
    monkeypatch.setenv("TELESCOPE_HOME", str(home))
    lock = tmp_path / "telescope.lock"

    def apply(wheel: bytes, **fields) -> str:
        publication = toy_publication(**fields)
        size = {"sha256": hashlib.sha256(wheel).hexdigest(), "size": len(wheel)}
        release = publication.release
        release = release.changed(wheel=release.wheel.changed(**size))
        write(registry, release, wheel)
        with pytest.raises(RegistryError) as raised:
            install(registry, "acme/toy", options=InstallOptions(lock=lock))
        left = {path.relative_to(home).parts[0] for path in home.rglob("*") if path.is_file()}
        assert left <= {"locks"}, "no wheel, no virtual environment, no record"
        assert not lock.exists()
        return str(raised.value)

    return apply


def write(registry: Registry, release, wheel: bytes) -> None:
    root = Path(registry.address)
    for path, data in (
        (f"index/{release.id}.jsonl", release.as_json() + b"\n"),
        (release.wheel.urls[0], wheel),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


@pytest.fixture
def toy() -> bytes:
    return toy_publication().wheel


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("start.pth", "may only contain"),
        (f"{MODULE}/start.pth", "which an environment may not contain"),
        ("sitecustomize.py", "may only contain"),
        (f"{MODULE}/usercustomize.py", "which an environment may not contain"),
        (f"{MODULE}-0.1.0.data/scripts/env", "may only contain"),
        (f"{MODULE}-0.1.0.data/purelib/numpy/__init__.py", "may only contain"),
        ("numpy/__init__.py", "may only contain"),
        ("numpy.py", "may only contain"),
        ("../../evil.py", "may only contain"),
        ("/etc/evil.py", "may only contain"),
        ("C:/evil.py", "may only contain"),
        (f"{MODULE}/../../evil.py", "may only contain"),
        (f"{MODULE}\\..\\evil.py", "may only contain"),
        (f"{MODULE}/fast.so", "which an environment may not contain"),
        (f"{MODULE}/a\nb.py", "not plain UTF-8 text"),
    ],
)
def test_files_that_would_run_or_land_elsewhere(refused, toy, rewrite, path, reason):
    assert reason in refused(rewrite(toy, {path: b"import os\n"}))


@pytest.mark.parametrize(
    "entry_points",
    [
        f"{GROUP}[console_scripts]\nenv = {MODULE}:main\n",
        f"{GROUP}[gui_scripts]\nenv = {MODULE}:main\n",
        f"{GROUP}[pytest11]\nspy = {MODULE}:main\n",
        "[telescope.environments]\ntoy = os:system\n",
    ],
)
def test_commands_and_foreign_entry_points(refused, toy, rewrite, entry_points):
    wheel = rewrite(toy, {f"{INFO}/entry_points.txt": entry_points.encode()})
    assert "entry point" in refused(wheel)


def test_a_symbolic_link(refused, toy):
    link = zipfile.ZipInfo(f"{MODULE}/link")
    link.external_attr = 0o120777 << 16
    said = refused(added(toy, (link, b"/etc/passwd")))
    assert f"{MODULE}/link" in said
    assert "plain file" in said


def test_two_files_of_one_name(refused, toy):
    wheel = added(toy, (zipfile.ZipInfo(f"{MODULE}/__INIT__.py"), b"evil = 1\n"))
    assert "same name" in refused(wheel)
    assert "__init__.py' twice" in refused(wheel.replace(b"__INIT__.py", b"__init__.py"))


def test_a_file_that_record_does_not_know(refused, toy, rewrite):
    wheel = rewrite(toy, {f"{MODULE}/__init__.py": b"evil = 1\n"}, record=False)
    said = refused(wheel)
    assert f"{MODULE}/__init__.py" in said
    assert "RECORD" in said
    wheel = rewrite(toy, {f"{MODULE}/more.py": b"evil = 1\n"}, record=False)
    said = refused(wheel)
    assert f"{MODULE}/more.py" in said
    assert "RECORD" in said


def test_a_bomb_by_ratio_and_one_by_size(refused, toy):
    zeros = zipfile.ZipInfo(f"{MODULE}/zeros.txt")
    zeros.compress_type = zipfile.ZIP_DEFLATED
    assert "a zip bomb" in refused(added(toy, (zeros, bytes(8 * 1024 * 1024))))
    declared = struct.pack("<I", 300 * 1024 * 1024)
    wheel = added(toy, (zipfile.ZipInfo(f"{MODULE}/big.txt"), b"x" * 1000))
    assert "more than" in refused(wheel.replace(struct.pack("<I", 1000), declared))


def test_a_bomb_of_many_files(refused, toy):
    zeros = [zipfile.ZipInfo(f"{MODULE}/{number}.txt") for number in range(20)]
    for one in zeros:
        one.compress_type = zipfile.ZIP_DEFLATED
    assert "a zip bomb" in refused(added(toy, *((one, bytes(1024 * 1024)) for one in zeros)))


@pytest.mark.parametrize(
    "paths",
    [
        (f"{MODULE}/a", f"{MODULE}/a/b.py"),
        (f"{MODULE}/a/b/c.py", f"{MODULE}/a"),
        (f"{MODULE}/A/b.py", f"{MODULE}/a"),
        (f"{MODULE}/\u00e9", f"{MODULE}/e\u0301/b.py"),
        (f"{INFO}/INSTALLER/b.py",),
        (f"{MODULE}/" + "/".join(["n" * 190] * 10),),
    ],
)
def test_what_no_folder_can_hold(refused, toy, rewrite, paths):
    said = refused(rewrite(toy, dict.fromkeys(paths, b"")))
    assert "a file and cannot be a folder" in said or "expected at most 512 bytes" in said


def test_more_than_is_inspected_in_a_short_time(refused, toy, rewrite):
    with zipfile.ZipFile(io.BytesIO(toy)) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
    many = "".join(f"Requires-Dist: pkg{number}\n" for number in range(1001))
    said = refused(rewrite(toy, {f"{INFO}/METADATA": f"{metadata}{many}".encode()}))
    assert "1002 requirements" in said
    for name, limit in (
        ("METADATA", 256),
        ("WHEEL", 16),
        ("entry_points.txt", 16),
        ("RECORD", 4096),
    ):
        long = {f"{INFO}/{name}": b"\n" * (limit * 1024 + 1)}
        assert f"its {name} is longer than" in refused(rewrite(toy, long, record=False))


@pytest.mark.parametrize(
    ("ends", "says"), [(b"", "more than 5000 files"), (b"\0", "before or after")]
)
def test_a_directory_that_takes_long_to_read_is_not_read(toy, ends, says, monkeypatch):
    start, end = toy.index(b"PK\x01\x02"), bytearray(toy[-22:])
    entries = toy[start:-22] * 12_000
    end[12:16] = struct.pack("<I", len(entries))
    end[20:22] = struct.pack("<H", len(ends))
    monkeypatch.setattr(zipfile, "ZipFile", lambda _: pytest.fail("it was read"))
    with pytest.raises(RegistryError, match=says):
        read_wheel(toy[:start] + entries + bytes(end) + ends, f"{MODULE}-0.1.0-py3-none-any.whl")


def test_a_bomb_that_lies_about_its_size(refused, toy):
    zeros = zipfile.ZipInfo(f"{MODULE}/zeros.txt")
    zeros.compress_type = zipfile.ZIP_DEFLATED
    size = 5_000_003
    wheel = added(toy, (zeros, bytes(size)))
    lying = wheel.replace(struct.pack("<I", size), struct.pack("<I", 1000))
    assert lying != wheel
    reason = refused(lying)
    assert "does not unpack to the size" in reason or "not a readable zip file" in reason


def test_an_encrypted_file(refused, toy):
    wheel = bytearray(toy)
    central = wheel.index(b"PK\x01\x02")
    wheel[central + 8] |= 1
    assert "is encrypted" in refused(bytes(wheel))


def test_a_name_that_is_not_utf8(refused, toy):
    wheel = added(toy, (zipfile.ZipInfo(f"{MODULE}/zz.txt"), b"x"))
    assert "UTF-8" in refused(wheel.replace(b"zz.txt", b"\xff\xfe.txt"))


def test_an_archive_around_the_archive(refused, toy):
    for wheel in (b"#!/bin/sh\n" + toy, toy + b"PK\x03\x04", added_comment(toy)):
        said = refused(wheel)
        assert "zip archive" in said
        assert "before or after" in said


def test_metadata_unlike_the_index(refused, toy, rewrite):
    with zipfile.ZipFile(io.BytesIO(toy)) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
    more = metadata.replace("Requires-Dist: telescope-core\n", "Requires-Dist: evil\n")
    assert "requires_dist" in refused(rewrite(toy, {f"{INFO}/METADATA": more.encode()}))
    other = metadata.replace("Name: telescope-env-acme-toy", "Name: numpy")
    assert "its METADATA is for numpy" in refused(
        rewrite(toy, {f"{INFO}/METADATA": other.encode()})
    )
    assert "factory" in refused(toy, factory=f"{MODULE}:Other")


@pytest.mark.parametrize("name", ["RECORD", "entry_points.txt"])
def test_metadata_that_is_not_text(refused, toy, rewrite, name):
    reason = refused(rewrite(toy, {f"{INFO}/{name}": b"\xff\xfe\x00"}, record=name != "RECORD"))
    assert name in reason
    assert "UTF-8" in reason


def test_one_changed_byte(tmp_path, registry, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    publication = toy_publication()
    wheel = bytearray(publication.wheel)
    wheel[len(wheel) // 2] ^= 1
    write(registry, publication.release, bytes(wheel))
    with pytest.raises(RegistryError, match="is not the one that was published"):
        install(registry, "acme/toy")
    assert not (tmp_path / "home" / "cache").exists()


def added(wheel: bytes, *members: tuple[zipfile.ZipInfo, bytes]) -> bytes:
    data = io.BytesIO(wheel)
    with zipfile.ZipFile(data, "a") as archive:
        for info, content in members:
            archive.writestr(info, content)
    return data.getvalue()


def added_comment(wheel: bytes) -> bytes:
    data = io.BytesIO(wheel)
    with zipfile.ZipFile(data, "a") as archive:
        archive.comment = b"and more"
    return data.getvalue()
