"""A registry in a temporary folder, and a toy environment to publish in it."""

import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from telescope_envs.registry import Registry
from telescope_envs.registry.build import normalise, publish

TOY = '''"""A toy."""

from telescope_core import ListSource, Example, SingleTurnEnvironment, reward


class Toy(SingleTurnEnvironment):
    """Says yes."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-0", prompt="yes?")])

    @reward
    def yes(self, rollout, example):
        return float(rollout.completion_text == "yes")
'''
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "telescope-env-acme-toy"
version = "{version}"
description = "Says yes"
requires-python = "{python}"
license = "MIT"
dependencies = {needs}

[project.entry-points."telescope.environments"]
toy = "telescope_env_acme_toy:Toy"

[tool.hatch.build.targets.wheel]
packages = ["telescope_env_acme_toy"]
"""


def write_project(
    folder: Path, *, version="0.1.0", code=TOY, python=">=3.11", needs=("telescope-core",)
) -> Path:
    package = folder / "telescope_env_acme_toy"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(code)
    text = PROJECT.format(version=version, python=python, needs=json.dumps(list(needs)))
    (folder / "pyproject.toml").write_text(text)
    return folder


def write_registry(root: Path) -> Registry:
    for folder in ("index", "namespaces"):
        (root / folder).mkdir(parents=True)
    (root / "config.json").write_text('{"format": 1, "name": "test"}')
    (root / "aliases.toml").write_text('[aliases]\ntoy = "acme/toy"\n')
    (root / "namespaces" / "acme.toml").write_text('owner = "acme"\n')
    return Registry.at(root)


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


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory) -> str:
    """The Python of a new virtual environment that also sees the packages under test."""
    import site

    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (packages / "seen.pth").write_text(lines)
    return str(folder / "bin" / "python")
