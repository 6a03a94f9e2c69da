"""`telescope-core[gymnasium]` names an extra of a package that needs telescope-core itself."""

import subprocess
import sys
import tomllib
import venv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("telescope-core", "telescope-adapters")


def write_wheel(folder: Path, requirement: Requirement) -> None:
    """Write an empty package that fulfills a requirement."""
    spec = spec_from_file_location("check_constraints", ROOT / "scripts/check_constraints.py")
    checker = module_from_spec(spec)
    spec.loader.exec_module(checker)
    version = next((one.version for one in requirement.specifier if one.operator != "<"), "1")
    name = requirement.name.replace("-", "_")
    checker.write_wheel(folder, name, version, tag="py3-none-any", needs=())


@pytest.mark.nightly
def test_pip_installs_the_extras_of_core_from_its_wheels(tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    build = [Path(sys.executable).parent / "uv", "build", "--wheel", "--no-build-isolation"]
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        subprocess.run(
            [*build, "--python", sys.executable, "--out-dir", links, folder],
            check=True,
            capture_output=True,
            timeout=120,
        )
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extra = project["optional-dependencies"]["gymnasium"]
        for line in (*project["dependencies"], *extra):
            if not line.startswith("telescope-"):
                write_wheel(links, Requirement(line))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    asked = ["--no-index", "--find-links", links, "telescope-core[gymnasium]"]
    subprocess.run(
        [python, "-m", "pip", "install", *asked], check=True, capture_output=True, timeout=300
    )
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run(
        [python, "-c", code, *PACKAGES, "gymnasium"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    core, adapters, gymnasium = found.stdout.split()
    assert core == adapters
    assert gymnasium.startswith("1.")
