"""Bundles: the same bytes each time, installed with networking blocked, and refused when touched.

Where the system permits it, installing runs in a network namespace that has no network at all;
elsewhere every proxy variable points to a listener, and whatever reaches out is counted there.
"""

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry

from telescope_envs.records.lockfile import read_lock

pytestmark = pytest.mark.slow
MAIN = (sys.executable, "-c", "from telescope_cli.main import main; main()")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


def telescope(*arguments: str, home: Path, prefix: tuple[str, ...] = (), **environ: str):
    return subprocess.run(
        [*prefix, *MAIN, "env", *arguments],
        env={**os.environ, "TELESCOPE_HOME": str(home), **environ},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def bundled(tmp_path_factory) -> Path:
    """A bundle of acme/toy 0.1.0, from a lock."""
    root = tmp_path_factory.mktemp("bundled")
    registry = write_registry(root / "registry")
    registry.store.publish(toy_publication())
    place = {"TELESCOPE_REGISTRY": registry.address}
    for arguments in (("install", "toy"), ("bundle", "-o", "first.zip")):
        done = telescope(*arguments, home=root / "home", **place)
        assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(root / "first.zip") as archive:
        archive.extractall(root / "unpacked")
    place |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "unpacked" / "packages")}
    done = telescope("bundle", "toy", "-o", "second.zip", home=root / "home", **place)
    assert done.returncode == 0, done.stderr
    assert (root / "first.zip").read_bytes() == (root / "second.zip").read_bytes()
    return root / "first.zip"


@pytest.fixture
def machine(tmp_path) -> Path:
    """The home of a machine that has nothing: no registry, no cache."""
    (tmp_path / "machine").mkdir()
    return tmp_path / "machine" / "home"


@pytest.fixture
def alone(machine):
    """Run telescope there with networking blocked; fails where anything reaches out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environ = {"UV_CACHE_DIR": str(machine.parent / "uv"), **dict.fromkeys(PROXIES, address)}
        environ |= {"UV_DEFAULT_INDEX": f"{address}/simple/", "UV_HTTP_RETRIES": "0"}
        unshare = shutil.which("unshare")
        blocked = (unshare, "-rn") if unshare else ()
        is_permitted = bool(blocked) and not subprocess.run([*blocked, "true"]).returncode

        def run(*arguments: str):
            prefix = tuple(part for part in blocked if part) if is_permitted else ()
            return telescope(*arguments, home=machine, prefix=prefix, **environ)

        yield run
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_bundle_installs_with_networking_blocked(bundled, machine, alone):
    done = alone("install", "--from-bundle", str(bundled), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {"name": "acme/toy", "state": "installed", "id": "acme/toy", "version": "0.1.0"}
    ]
    lock = machine.parent / "telescope.lock"
    assert read_lock(lock) == read_lock(bundled.parent / "telescope.lock")
    assert "unchanged" in alone("install", "toy", "--from-bundle", str(bundled), "--json").stdout
    synced = alone("sync", "--locked", "--offline")
    assert synced.returncode == 0, synced.stderr
    shutil.rmtree(machine / "venvs")
    assert alone("sync", "--locked", "--offline").returncode == 0, "from caches alone"
    shutil.rmtree(machine / "venvs")
    shutil.rmtree(machine.parent / "uv")
    assert alone("sync", "--locked", "--offline").returncode == 0, "from what the bundle brought"
    shutil.rmtree(machine / "venvs")
    shutil.rmtree(machine.parent / "uv")
    shutil.rmtree(machine / "cache" / "packages")
    missing = alone("sync", "--locked", "--offline")
    assert missing.returncode == 3
    assert "--offline uses only caches" in missing.stderr


def rewritten(bundled: Path, changes: dict[str, bytes | None]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(bundled) as archive, zipfile.ZipFile(packed, "w") as target:
        files = {name: archive.read(name) for name in archive.namelist()}
        for name, data in (files | changes).items():
            if data is not None:
                target.writestr(name, data)
    return packed.getvalue()


def evil_wheel(bundled: Path) -> dict[str, bytes | None]:
    """Another wheel of the environment, with a manifest that fits, but for its record."""
    with zipfile.ZipFile(bundled) as archive:
        manifest = json.loads(archive.read("bundle.json"))
    data = toy_publication(code="evil = 1\n").wheel
    for file in manifest["files"]:
        if file["path"].startswith("environments/"):
            file |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            path = file["path"]
    return {path: data, "bundle.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("package", "is not the file that its manifest lists"),
        ("wheel", "which its lock does not name"),
        ("extra", "manifest and files differ"),
        ("missing", "manifest and files differ"),
        ("no manifest", "it has no bundle.json"),
        ("newer", "upgrade telescope-envs"),
        ("platform", "was made for plan9-vax"),
        ("outside", "which a bundle must not hold"),
        ("no zip", "is not a readable bundle"),
    ],
)
def test_a_touched_bundle_is_refused_and_leaves_nothing(bundled, machine, alone, change, message):
    with zipfile.ZipFile(bundled) as archive:
        names = archive.namelist()
        manifest = archive.read("bundle.json")
    package = next(name for name in names if name.startswith("packages/"))
    outside = json.loads(manifest)
    outside["files"].append({"path": "../evil.whl", "sha256": "0" * 64, "size": 1})
    changes: dict[str, dict[str, bytes | None]] = {
        "package": {package: b"evil"},
        "wheel": evil_wheel(bundled),
        "extra": {"packages/evil-1-py3-none-any.whl": b"evil"},
        "missing": {package: None},
        "no manifest": {"bundle.json": None},
        "newer": {"bundle.json": manifest.replace(b'"version": 1', b'"version": 2', 1)},
        "platform": {"bundle.json": manifest.replace(b"linux-", b"plan9-vax-", 1)},
        "outside": {"bundle.json": json.dumps(outside).encode(), "../evil.whl": b"x"},
    }
    path = machine.parent / "touched.zip"
    path.write_bytes(rewritten(bundled, changes[change]) if change in changes else b"no zip")
    done = alone("install", "--from-bundle", str(path))
    assert message in done.stderr
    assert done.returncode in (2, 4)
    assert "Traceback" not in done.stderr
    assert {found.name for found in machine.glob("*")} <= {"locks"}
    assert not (machine.parent / "telescope.lock").exists()
