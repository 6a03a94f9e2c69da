"""`telescope env verify`: files, packages, lock and registry, checked again."""

import importlib.util
import json
import marshal
import py_compile
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication
from tests.envs.using.conftest import lock_of

from telescope_core.errors import RegistryError
from telescope_envs.install.data import store_wheel
from telescope_envs.install.packages import dependency_tree
from telescope_envs.install.venv import write_wheel
from telescope_envs.install.verify_installed import (
    FindingKind,
    changed_byte_code,
    compared,
    extra_files,
    lock_findings,
    registry_findings,
    unreachable,
    wheel_findings,
)
from telescope_envs.records.files import sha256_of
from telescope_envs.records.installed import Installation
from telescope_envs.records.release import (
    Deprecation,
    Status,
)
from telescope_envs.rules.wheel import read_wheel, record_hash


def put_package(site: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """Install a package of one file, as pip would."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {need}\n" for need in needs]
    files = {
        f"{name}/__init__.py": b"VALUE = 1\n",
        f"{info}/METADATA": (
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{''.join(lines)}".encode()
        ),
    }
    rows = [f"{path},{record_hash(data)},{len(data)}\n" for path, data in files.items()]
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)


@pytest.fixture
def venv(tmp_path) -> Path:
    """What looks like a virtual environment with two packages, beside an empty one."""
    for name in ("venv", "empty"):
        site = tmp_path / name / "site"
        site.mkdir(parents=True)
        (site / "_virtualenv.pth").write_text("import _virtualenv")
        (tmp_path / name / "pyvenv.cfg").write_text(f"prompt = {name}")
    put_package(tmp_path / "venv" / "site", "one", "1.0", ("two>=1", "gone; extra == 'x'"))
    put_package(tmp_path / "venv" / "site", "two", "2.0", ("one", "absent>3"))
    return tmp_path / "venv"


def packages(venv: Path):
    return {one.name: one for one in distributions(path=[str(venv / "site")])}


def findings(venv: Path) -> dict[Path, FindingKind]:
    parts = [compared(name, package) for name, package in packages(venv).items()]
    recorded = [file for part in parts for file in part.recorded]
    found = [
        *(finding for part in parts for finding in part.changed),
        *extra_files(venv, recorded, venv.with_name("empty")),
        *changed_byte_code(venv / "site"),
    ]
    return {Path(finding.what): finding.kind for finding in found}


def test_a_whole_one_has_no_findings(venv):
    py_compile.compile(str(venv / "site" / "one" / "__init__.py"))
    assert findings(venv) == {}


def test_changed_missing_and_extra_files_are_found(venv):
    site = venv / "site"
    changed, missing = site / "one" / "__init__.py", site / "two" / "__init__.py"
    changed.write_text("VALUE = 2\n")
    missing.unlink()
    extra = [site / "evil.pth", site / "_virtualenv.pth", site / "one/more.py", venv / "bin/env"]
    for path in extra:
        path.parent.mkdir(exist_ok=True)
        path.write_text("import os")
    assert findings(venv) == {
        changed: FindingKind.CHANGED,
        missing: FindingKind.MISSING,
        **dict.fromkeys(extra, FindingKind.EXTRA),
    }


def test_byte_code_of_something_else_is_found(venv):
    source = venv / "site" / "one" / "__init__.py"
    path = Path(py_compile.compile(str(source)))
    header = path.read_bytes()[:16]
    path.write_bytes(header + marshal.dumps(compile("VALUE = 7", str(source), "exec")))
    stray = Path(importlib.util.cache_from_source(str(source.with_name("stray.py"))))
    stray.write_bytes(header)
    assert findings(venv) == {
        path: FindingKind.CHANGED,
        stray: FindingKind.EXTRA,
    }


def record(locked=None, **fields) -> Installation:
    release = toy_publication(**fields).release
    return Installation(
        registry="x", installed_at=datetime.now(UTC), release=release, locked=locked
    )


def test_packages_that_are_not_the_locked_ones_are_found(venv):
    locked = lock_of(toy_publication().release, "x").changed(
        requirements=(
            "one==1.0 --hash=sha256:0",
            "three==3.0 ; python_version >= '3' --hash=sha256:0",
            "four==4.0 ; sys_platform == 'nowhere' --hash=sha256:0",
        )
    )
    found = {one.what: one for one in lock_findings(record(), locked, packages(venv))}
    assert set(found) == {locked.wheel.partition("-")[0].replace("_", "-"), "three", "two"}
    assert "3.0 is locked" in found["three"].text
    assert "2.0 is installed" in found["two"].text
    assert all(one.is_problem for one in found.values())


@pytest.mark.usefixtures("home")
def test_a_published_file_that_installing_replaces_is_no_finding(venv, toy_wheel, rewrite):
    info = "telescope_env_acme_toy-0.1.0.dist-info"
    wheel = rewrite(toy_wheel, {f"{info}/INSTALLER": b"uv"})
    site = venv / "site"
    one = record()
    write_wheel(read_wheel(wheel, one.release.wheel.filename), site)
    wheel_file = one.release.wheel.changed(sha256=sha256_of(wheel), size=len(wheel))
    one = one.changed(release=one.release.changed(wheel=wheel_file))
    store_wheel(wheel, one.release, registry="x")
    assert [*wheel_findings(one, None, packages(venv))] == []


def test_what_the_registry_says_now_is_told(published):
    said = Status(
        yanked={"0.1.0": "wrong gold"},
        deprecated=Deprecation(reason="old", replacement="acme/new"),
        advisories=("reads files",),
    )
    assert list(registry_findings(published, record())) == []
    published.store.change_status("acme/toy", lambda status: said)
    found = [(one.kind.value, one.text) for one in registry_findings(published, record())]
    assert found == [
        ("yanked", "is yanked: wrong gold"),
        ("yanked", "advisory: reads files"),
        ("note", "is deprecated: old; use acme/new"),
    ]
    other = record(code="# other bytes")
    (changed, *_) = registry_findings(published, other)
    assert (changed.kind, "releases never change" in changed.text) == (FindingKind.REGISTRY, True)
    (gone, *_) = registry_findings(published, record(version="0.2.0"))
    assert "is not in" in gone.text
    assert not unreachable("x", RegistryError("no route")).is_problem


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('owner = "acme"\nstatus = "suspended"\n', FindingKind.REGISTRY),
        ('owner = "acme"\nstatus = "suspended"\nwithheld = false\n', FindingKind.NOTE),
        ("", FindingKind.REGISTRY),
    ],
)
def test_an_owner_who_is_suspended_or_gone_is_told(published, registry_place, text, kind):
    owner = registry_place / "namespaces" / "acme.toml"
    if text:
        owner.write_text(text)
    else:
        owner.unlink()
    (found,) = registry_findings(published, record())
    assert (found.what, found.kind, "owner" in found.text) == ("acme/toy", kind, True)


def test_the_tree_writes_each_package_out_once(venv):
    (one,) = dependency_tree(["one==1.0"], packages(venv))
    assert (one.name, one.version, one.wanted, one.is_repeated) == ("one", "1.0", "==1.0", False)
    (two,) = one.needs
    absent, again = two.needs
    assert (absent.name, absent.version) == ("absent", "")
    assert (again.name, again.is_repeated, again.needs) == ("one", True, ())


@pytest.mark.slow
def test_a_tampered_file_of_an_installed_environment_is_found(telescope, published, home):
    assert telescope("env", "install", "toy")[0] == 0
    code, out, _ = telescope("env", "verify", "acme/toy", "--json")
    (whole,) = json.loads(out)
    assert (whole["is_whole"], whole["findings"]) == (True, [])
    (folder,) = home.glob("venvs/*/lib/python*/site-packages")
    (folder / "telescope_env_acme_toy" / "__init__.py").write_text("")
    (folder / "evil.pth").write_text("import os")
    code, out, _ = telescope("env", "verify", "acme/toy", "--json")
    assert code == 1
    (row,) = json.loads(out)
    assert {(one["kind"], Path(one["what"]).name) for one in row["findings"]} == {
        ("changed", "__init__.py"),
        ("extra", "evil.pth"),
    }
    info = folder / "telescope_env_acme_toy-0.1.0.dist-info" / "RECORD"
    lines = info.read_text().splitlines()
    new = record_hash(b"")
    info.write_text(
        "".join(
            f"telescope_env_acme_toy/__init__.py,{new},0\n"
            if line.startswith("telescope_env_acme_toy/__init__.py")
            else f"{line}\n"
            for line in lines
        )
    )
    (row,) = json.loads(telescope("env", "verify", "acme/toy", "--json")[1])
    assert "than in the published wheel" in row["findings"][-1]["text"]
