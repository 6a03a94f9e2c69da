"""Writes what tests of the Hub begin from: the project of a toy, and an empty registry."""

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from telescope_envs.publish.build import normalise
from telescope_envs.records.reading import Publication
from telescope_envs.records.release import (
    Release,
    RewardRange,
    WheelFile,
)
from telescope_envs.registry import Registry
from telescope_envs.rules.wheel import read_wheel

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
    """Write a registry in which acme may publish, and `toy` will mean acme/toy."""
    for folder in ("index", "namespaces", "status/acme"):
        (root / folder).mkdir(parents=True)
    (root / "config.json").write_text('{"format": 1, "name": "test"}')
    (root / "aliases.toml").write_text('[aliases]\ntoy = "acme/toy"\n')
    (root / "namespaces" / "acme.toml").write_text('owner = "acme"\n')
    return Registry.at(root)


def toy_files(
    version: str, *, owner: str, name: str, code: str, needs: Sequence[str] = ("telescope-core",)
) -> dict[str, str]:
    """Return what a wheel of the toy holds, but for its RECORD."""
    module = f"telescope_env_{owner}_{name}".replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: {module.replace('_', '-')}\nVersion: {version}\n"
        "Summary: Says yes\nLicense-Expression: MIT\nRequires-Python: >=3.11\n"
    ) + "".join(f"Requires-Dist: {need}\n" for need in needs)
    return {
        f"{module}/__init__.py": code,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[telescope.environments]\n{name} = {module}:Toy\n",
        f"{info}/RECORD": "",
    }


def toy_publication(
    version: str = "0.1.0", *, owner: str = "acme", name: str = "toy", code: str = TOY, **fields
) -> Publication:
    """Return a release of the toy, made without a build; `fields` replace those of the record.

    `needs`: what its wheel requires.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        needs = fields.pop("needs", ("telescope-core",))
        files = toy_files(version, owner=owner, name=name, code=code, needs=needs)
        for path, text in files.items():
            archive.writestr(path, text)
    wheel = normalise(packed.getvalue(), epoch=1577836800)
    module = f"telescope_env_{owner}_{name}".replace("-", "_")
    filename = f"{module}-{version}-py3-none-any.whl"
    contents = read_wheel(wheel, filename)
    release = Release(
        owner=owner,
        name=name,
        version=version,
        summary=contents.summary,
        distribution=contents.distribution,
        module=contents.module,
        factory=contents.factory,
        wheel=WheelFile(
            filename=filename,
            urls=(f"artifacts/{filename}",),
            sha256=hashlib.sha256(wheel).hexdigest(),
            size=len(wheel),
            metadata_sha256=contents.metadata_sha256,
        ),
        requires_python=contents.requires_python,
        requires_dist=contents.requires_dist,
        config_schema_sha256="0" * 64,
        splits={"train": 1, "eval": 1},
        reward=RewardRange(minimum=0.0, maximum=1.0, success=1.0),
        network="none",
        publisher=owner,
        published_at=datetime(2026, 11, 21, 12, tzinfo=UTC),
        license=contents.license,
    )
    return Publication(release=release.changed(**fields), wheel=wheel)
