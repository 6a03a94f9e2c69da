"""Writes what tests of the Hub begin from: the project of a toy, and an empty registry."""

import json
from pathlib import Path

from telescope_envs.registry import Registry

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
    for folder in ("index", "namespaces"):
        (root / folder).mkdir(parents=True)
    (root / "config.json").write_text('{"format": 1, "name": "test"}')
    (root / "aliases.toml").write_text('[aliases]\ntoy = "acme/toy"\n')
    (root / "namespaces" / "acme.toml").write_text('owner = "acme"\n')
    return Registry.at(root)
