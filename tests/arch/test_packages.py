"""Layers, versions, start-up time, and what an import must not bring along."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("telescope-core", "telescope-envs", "telescope-train", "telescope-ui", "telescope-cli")
PROJECTS = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    for name in PACKAGES
}
HEAVY = ("torch", "transformers", "datasets", "ray", "vllm")


def child_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def best_cpu_s(command: list[str], *, limit_s: float, max_runs: int = 12) -> float:
    """Return the least CPU time of up to `max_runs` runs; stops at the first below `limit_s`.

    Wall time would measure the neighbours as well. The first run may write byte code, as it
    would for a user.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    best_s = float("inf")
    for _ in range(max_runs):
        before_s = child_cpu_s()
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        best_s = min(best_s, child_cpu_s() - before_s)
        if best_s < limit_s:
            break
    return best_s


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
            r"(telescope-(?:core|envs|train|ui|cli))\[([a-z, -]+)\]",
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


@pytest.mark.parametrize("module", ["telescope_core", "telescope_envs", "telescope_cli.main"])
def test_imports_bring_no_heavy_library(module):
    code = f"import sys; from {module} import *; print(*(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_core_imports_quickly():
    assert best_cpu_s([sys.executable, "-c", "import telescope_core"], limit_s=0.3) < 0.3


def test_all_of_core_imports_in_little_more_than_its_libraries_take():
    libraries = "import asyncio, inspect, ssl; from pydantic import BaseModel; BaseModel.model_dump"
    least_s = best_cpu_s([sys.executable, "-c", libraries], limit_s=0, max_runs=4)
    limit_s = max(0.3, 2.5 * least_s)
    everything = [sys.executable, "-c", "from telescope_core import *"]
    assert best_cpu_s(everything, limit_s=limit_s) < limit_s


def test_help_answers_quickly():
    telescope = str(Path(sys.executable).parent / "telescope")
    assert best_cpu_s([telescope, "--help"], limit_s=0.25) < 0.25
