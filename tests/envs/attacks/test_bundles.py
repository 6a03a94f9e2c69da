"""A bundle from anywhere: it brings what its lock names and nothing else, or nothing at all."""

import hashlib
import os
import random
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.envs.bundles import (
    DEP,
    dep_line,
    entry_of,
    environments_of,
    files_of,
    write_bundle,
    write_files,
)
from tests.envs.package_index import tiny_wheel
from tests.envs.projects import toy_publication

from telescope_cli import main as cli
from telescope_core.errors import EnvironmentLoadError, TelescopeError
from telescope_envs.install.open_bundle import (
    MAX_BUNDLE_BYTES,
    opened_bundle,
)
from telescope_envs.install.requirements import install_requirements
from telescope_envs.install.steps import InstallOptions
from telescope_envs.processes.uv import Uv
from telescope_envs.records.lockfile import Lock

TOY, PET = toy_publication(), toy_publication(name="pet")
DEP_WHEEL = tiny_wheel("dep", "9.0")
LOCK = Lock(environments=(entry_of(TOY, [dep_line()]),))
BOTH = Lock(environments=(entry_of(PET), entry_of(TOY, [dep_line()])))


@pytest.fixture
def refused(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Install from a bundle that must be refused, see that nothing was written, and say why."""

    def run(path: Path, *options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["env", "install", "--from-bundle", str(path), *options])
        said = capsys.readouterr().err
        assert ended.value.code in (2, 4), said
        assert "Traceback" not in said
        kept = [one for one in home.rglob("*") if one.is_file() and "locks" not in one.parts]
        assert kept == [], "a refused bundle leaves nothing"
        assert not (tmp_path / "telescope.lock").exists()
        return said

    return run


def test_a_bundle_as_it_should_be_is_kept_as_a_whole(home: Path, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b.zip", TOY, {DEP: DEP_WHEEL})
    with opened_bundle(path, progress=lambda step: None) as bundle:
        assert [one.id for one in bundle.lock.environments] == ["acme/toy"]
        assert [one.name for one in bundle.packages.iterdir()] == [DEP]
    kept = {one.name for one in home.rglob("*.whl")}
    assert kept == {DEP, TOY.release.wheel.filename}


@pytest.mark.parametrize(
    "packages",
    [
        {DEP: tiny_wheel("dep", "9.0", code="evil = 1\n")},
        {DEP: DEP_WHEEL, "evil-1.0-py3-none-any.whl": tiny_wheel("evil", "1.0")},
        {DEP: DEP_WHEEL, "dep-9.1-py3-none-any.whl": DEP_WHEEL},
        {DEP: DEP_WHEEL, "six-1.17.0-py2.py3-none-any.whl": DEP_WHEEL},
        {"dep.whl": DEP_WHEEL},
        {"telescope_core-99.0-py3-none-any.whl": DEP_WHEEL},
    ],
)
def test_a_package_that_its_lock_does_not_name_is_refused(packages, tmp_path, refused) -> None:
    said = refused(write_bundle(tmp_path / "b.zip", TOY, packages))
    assert any(f"packages/{name}" in said for name in packages)
    assert "lock" in said


def test_a_wheel_of_an_environment_that_its_lock_does_not_name_is_refused(tmp_path, refused):
    files = files_of([TOY, PET], LOCK, {DEP: DEP_WHEEL})
    said = refused(write_files(tmp_path / "b.zip", files, environments_of(TOY)))
    assert PET.release.wheel.filename in said
    said = refused(write_files(tmp_path / "b.zip", files, environments_of(TOY, PET)))
    assert PET.release.id in said


@pytest.mark.parametrize(
    ("environments", "lock"),
    [
        (environments_of(TOY), BOTH),
        (environments_of(TOY, TOY), LOCK),
        (environments_of(), LOCK),
        (environments_of(TOY, registry="https://hub.example"), LOCK),
        (environments_of(toy_publication("0.2.0")), LOCK),
        (environments_of(TOY), Lock()),
    ],
)
def test_a_lock_unlike_the_manifest_is_refused(environments, lock, tmp_path, refused) -> None:
    path = write_files(tmp_path / "b.zip", files_of([TOY], lock, {DEP: DEP_WHEEL}), environments)
    said = refused(path)
    assert "lock" in said
    assert "manifest" in said


def test_one_bad_wheel_keeps_out_all_the_others(tmp_path: Path, refused) -> None:
    data = b"no wheel"
    about = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    release = TOY.release.changed(wheel=TOY.release.wheel.changed(**about))
    bad = replace(TOY, release=release, wheel=data)
    lock = Lock(environments=(entry_of(PET), entry_of(bad)))
    path = write_files(
        tmp_path / "b.zip", files_of([PET, bad], lock, {}), environments_of(PET, bad)
    )
    said = refused(path)
    assert bad.release.wheel.filename in said
    assert "zip file" in said


@pytest.mark.parametrize("text", ["version = 1\nx = [\n", "", "version = 2\n", '"\\ud800"'])
def test_a_lock_that_cannot_be_read_names_the_bundle(text: str, tmp_path: Path, refused) -> None:
    files = files_of([TOY], LOCK, {DEP: DEP_WHEEL}) | {"telescope.lock": text.encode()}
    path = write_files(tmp_path / "b.zip", files, environments_of(TOY))
    said = refused(path)
    assert f"{path}: telescope.lock" in said
    assert "version control" not in said, "the lock of a bundle is in no version control"


def test_a_bundle_larger_than_the_limit_is_not_even_read(tmp_path: Path, refused) -> None:
    path = tmp_path / "b.zip"
    path.touch()
    os.truncate(path, MAX_BUNDLE_BYTES + 1)  # a file with a hole: it takes no space
    said = refused(path)
    assert str(MAX_BUNDLE_BYTES + 1) in said
    assert "--max-bundle-gb 11" in said
    os.truncate(path, 2 * 10**9)
    assert "--max-bundle-gb 2" in refused(path, "--max-bundle-gb", "1")
    assert "--max-bundle-gb" not in refused(path)


def test_files_that_claim_more_than_the_limit_are_not_unpacked(tmp_path: Path, refused) -> None:
    files = files_of([TOY], LOCK, {DEP: DEP_WHEEL})
    listed = [{"path": name, "sha256": "0" * 64, "size": 10**12} for name in sorted(files)]
    path = write_files(tmp_path / "b.zip", files, environments_of(TOY), files=listed)
    assert "--max-bundle-gb" in refused(path)
    listed[0]["size"] = -1
    path = write_files(tmp_path / "b.zip", files, environments_of(TOY), files=listed[:1])
    assert "size" in refused(path)


@pytest.mark.slow
def test_packed_files_are_refused_because_they_may_be_any_size(tmp_path: Path, refused) -> None:
    plain = write_bundle(tmp_path / "plain.zip", TOY, {DEP: DEP_WHEEL})
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) if name != "bundle.json" else b" " * 10**8)
    assert "compressed" in refused(path)


@pytest.mark.parametrize("where", ["before", "after", "as another archive"])
def test_bytes_around_a_bundle_are_refused(where: str, tmp_path: Path, refused) -> None:
    path = write_bundle(tmp_path / "b.zip", TOY, {DEP: DEP_WHEEL})
    data = path.read_bytes()
    whole = {"before": b"#!/bin/sh\n" + data, "after": data + b"\n", "as another archive": data * 2}
    path.write_bytes(whole[where])
    assert "before or after its zip archive" in refused(path)


def test_too_many_files_are_refused(tmp_path: Path, refused) -> None:
    many = {f"p{number}-1.0-py3-none-any.whl": b"" for number in range(10_001)}
    assert "files" in refused(write_bundle(tmp_path / "b.zip", TOY, many))


@pytest.mark.slow
def test_any_changed_byte_is_refused_or_changes_nothing(home: Path, tmp_path: Path) -> None:
    good = write_bundle(tmp_path / "good.zip", TOY, {DEP: DEP_WHEEL}).read_bytes()
    path = tmp_path / "b.zip"
    rng = random.Random(7)
    num_refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cut = rng.random() < 0.1
        path.write_bytes(data[: rng.randrange(len(data))] if cut else data)
        try:
            with opened_bundle(path, progress=lambda step: None) as bundle:
                brought = {one.name: one.read_bytes() for one in bundle.packages.iterdir()}
                assert brought == {DEP: DEP_WHEEL}
        except TelescopeError:
            num_refused += 1
    assert num_refused > 300
    wheels = {one.name: one.read_bytes() for one in home.rglob("*.whl")}
    assert all(data in (TOY.wheel, DEP_WHEEL) for data in wheels.values())


def kept_bundle(path: Path, code: str) -> str:
    """Keep a bundle whose `dep` has this code; returns the line that locks it."""
    dep = tiny_wheel("dep", "9.0", code=code)
    lock = Lock(environments=(entry_of(TOY, [dep_line(dep)]),))
    write_files(path, files_of([TOY], lock, {DEP: dep}), environments_of(TOY))
    with opened_bundle(path, progress=lambda step: None):
        return dep_line(dep)


@pytest.mark.slow
def test_what_a_bundle_brought_is_never_chosen_only_installed_by_its_hash(home, tmp_path):
    lines = {code: kept_bundle(tmp_path / "b.zip", code) for code in ("A = 1\n", "A = 2\n")}
    uv = Uv(offline=True)
    (tmp_path / "wanted.in").write_text("dep\n")
    with pytest.raises(EnvironmentLoadError, match="cannot be locked"):
        uv.run(
            ["pip", "compile", str(tmp_path / "wanted.in"), "--universal"],
            failure="it cannot be locked",
        )
    options = InstallOptions(offline=True)
    for code, line in lines.items():
        venv = tmp_path / code[4]
        uv.run(["venv", "--no-project", "--python", sys.executable, str(venv)], failure="no venv")
        install_requirements(venv / "bin" / "python", [line], uv, needed_by="x", options=options)
        (installed,) = venv.glob("lib/python*/site-packages/dep.py")
        assert installed.read_text() == code, "each lock gets its own bytes of the same file name"
