"""Fixtures of tests/envs and tests/envs: a registry in a temporary folder, and a toy for it."""

import io
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.envs.projects import write_project, write_registry

from telescope_envs.publish.build import normalise
from telescope_envs.publish.first_party import publish
from telescope_envs.registry import Registry


@pytest.fixture(scope="session")
def packages_without_environments(tmp_path_factory) -> Path:
    """A folder of links to every installed package, except those of environments."""
    prefix = tmp_path_factory.mktemp("packages")
    (prefix / "bin").symlink_to(Path(sys.executable).parent)  # where uv looks for its program
    folder = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    folder.mkdir(parents=True)
    for installed in map(Path, site.getsitepackages()):
        for path in installed.iterdir():
            if not path.name.startswith("telescope_env_"):
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(autouse=True)
def without_environments(packages_without_environments, monkeypatch) -> None:
    """Hide what this machine has installed: neither results nor times may depend on it."""
    hidden = dict.fromkeys(site.getsitepackages(), str(packages_without_environments))
    monkeypatch.setattr(sys, "path", [hidden.get(path, path) for path in sys.path])


@pytest.fixture
def registry(tmp_path) -> Registry:
    """An empty registry in which acme may publish."""
    return write_registry(tmp_path / "registry")


@pytest.fixture
def make_project(tmp_path) -> Callable[..., Path]:
    """Write the toy's project; keywords replace parts of it."""
    return partial(write_project, tmp_path / "project")


@pytest.fixture(scope="session")
def published_once(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("published")
    publish(
        write_registry(root / "registry").store,
        write_project(root / "project"),
        owner="acme",
        datasets=[],
    )
    return root / "registry"


@pytest.fixture
def published(published_once, tmp_path) -> Registry:
    """A registry that holds acme/toy 0.1.0."""
    shutil.copytree(published_once, tmp_path / "registry")
    return Registry.at(tmp_path / "registry")


@pytest.fixture
def registry_place(published) -> Path:
    """The folder of a registry that holds acme/toy 0.1.0."""
    return Path(published.address)


@pytest.fixture
def toy_wheel(published_once) -> bytes:
    """The bytes of the wheel of acme/toy 0.1.0."""
    (wheel,) = (published_once / "artifacts").iterdir()
    return wheel.read_bytes()


@pytest.fixture
def rewrite() -> Callable[..., bytes]:
    """Return wheel bytes with files added, replaced or (None) removed and RECORD made to fit."""

    def apply(data: bytes, changes: dict[str, bytes | None], *, record: bool = True) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files: dict[str, bytes | None] = {n: archive.read(n) for n in archive.namelist()}
        files.update(changes)
        rewritten = io.BytesIO()
        with zipfile.ZipFile(rewritten, "w") as archive:
            for name, content in files.items():
                if content is not None:
                    archive.writestr(name, content)
        return normalise(rewritten.getvalue(), epoch=1577836800) if record else rewritten.getvalue()

    return apply


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The data folder of a machine where nothing is installed, and work in an empty folder."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory, packages_without_environments) -> str:
    """The Python of a new virtual environment that also sees the packages under test."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    line = f"import site; site.addsitedir({str(packages_without_environments)!r})\n"
    (packages / "seen.pth").write_text(line)
    return str(folder / "bin" / "python")
