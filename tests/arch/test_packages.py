"""Layers, versions, and what a start must not bring along."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("telescope-core", "telescope-adapters", "telescope-envs", "telescope-train"),
    *("telescope-ui", "telescope-cli"),
)
PROJECTS = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    for name in PACKAGES
}


@pytest.mark.slow
def test_layers_hold():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_versions_move_together_and_are_pinned_to_each_other():
    versions = {name: project["version"] for name, project in PROJECTS.items()}
    assert len(set(versions.values())) == 1, versions
    for name, project in PROJECTS.items():
        extras = project.get("optional-dependencies", {})
        for line in [
            *project["dependencies"],
            *(item for items in extras.values() for item in items),
        ]:
            if line.startswith("telescope-"):
                assert re.search(rf"=={re.escape(versions[name])}$", line), f"{name}: {line}"


def test_packages_are_typed_and_licensed():
    for name, project in PROJECTS.items():
        folder = ROOT / "packages" / name / "src" / name.replace("-", "_")
        assert (folder / "py.typed").is_file(), name
        assert project["license"] == "Apache-2.0", name
        assert project["requires-python"] == ">=3.11", name


def test_every_extra_that_is_named_exists():
    """In messages, documentation and scripts: `pip` only warns about an extra that it lacks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    texts = [file for file in files if file.suffix in (".py", ".md", ".sh", ".toml")]
    named = {
        (package, extra, str(file.relative_to(ROOT)))
        for file in texts
        if file.is_file()
        for package, extras in re.findall(
            r"(telescope-(?:core|adapters|envs|train|ui|cli))\[([a-z, -]+)\]",
            file.read_text(encoding="utf-8"),
        )
        for extra in extras.replace(" ", "").split(",")
    }
    with_extras = {name for name in PACKAGES if "optional-dependencies" in PROJECTS[name]}
    assert {package for package, _, _ in named} == with_extras
    wrong = [
        f"{where}: {package}[{extra}]"
        for package, extra, where in sorted(named)
        if extra not in PROJECTS[package]["optional-dependencies"]
    ]
    assert wrong == []


def imported_of_core(source: bytes) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_released_environments_import_is_there():
    """A wheel in somebody's registry keeps the imports that it was built with."""
    imported = {
        found
        for wheel in (ROOT / "registry/artifacts").glob("*.whl")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".py")
        for found in imported_of_core(zipfile.ZipFile(wheel).read(name))
        if found[0].partition(".")[0] == "telescope_core"
    }
    assert len(imported) > 50
    gone = [
        f"{module}: {name}"
        for module, name in sorted(imported)
        if name and not hasattr(importlib.import_module(module), name)
    ]
    assert gone == []


@pytest.mark.parametrize("door", ["errors", "protocols", "types"])
def test_a_door_names_every_class_behind_it(door):
    home = importlib.import_module(f"telescope_core.base.{door}")
    public = {
        name
        for name, found in vars(home).items()
        if inspect.isclass(found) and found.__module__ == home.__name__ and name[0] != "_"
    }
    assert public - set(importlib.import_module(f"telescope_core.{door}").__all__) == set()


PYDANTIC = {
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}
HELP = "import sys; sys.argv = ['telescope', '--help']; from telescope_cli.main import main; main()"
TYPER = {"annotated_doc", "shellingham", "typer"}
STARTS = {
    "import telescope_core": set(),
    "from telescope_core import *": PYDANTIC,
    "import telescope_envs": PYDANTIC,
    "import telescope_cli.main": TYPER,
    HELP: TYPER,
}
"""Statement -> packages that it may load besides the standard library and our own.

How long it takes is what `benchmarks/bench_start.py` tells; nearly all of that is other packages.
"""
LISTS_LOADED = """
import atexit, sys
def tell():
    loaded = {name.partition(".")[0] for name in sys.modules if not name.startswith("_")}
    print("loaded:", *sorted(loaded - set(sys.stdlib_module_names)))
atexit.register(tell)
"""


@pytest.mark.parametrize("statement", STARTS)
def test_a_start_loads_only_what_it_needs(statement):
    command = [sys.executable, "-c", LISTS_LOADED + statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    ours = {name.replace("-", "_") for name in PACKAGES}
    assert loaded - ours - STARTS[statement] == set()
