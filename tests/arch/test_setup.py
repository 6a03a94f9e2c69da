"""Setting up: which Python is taken, which stack, and that a stack takes its own builds alone.

That the versions can be installed on each Python is shown by `make check-constraints`, which asks
the package index.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
HERE = f"{sys.version_info.major}{sys.version_info.minor}"
TAG = f"cp{HERE}-cp{HERE}-manylinux_2_28_x86_64"
BUILDS = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "vllm", "flashinfer-python")
"""Packages of the CUDA stack of which builds for other hardware have the same version."""


def load_checker():
    spec = spec_from_file_location("check_constraints", ROOT / "scripts/check_constraints.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKER = load_checker()


def resolve(links: Path, stack: str, package: str) -> str:
    """Return the version that the pins of `stack` choose out of the wheels in `links`."""
    done = subprocess.run(
        [
            *(UV, "pip", "install", "--no-config", "--dry-run", "--no-index", "--no-deps"),
            *("--python", sys.executable, "--target", links / "target", "--find-links", links),
            *("--constraints", ROOT / f"constraints/{stack}.txt", package),
        ],
        env={"PATH": os.environ["PATH"], "UV_CACHE_DIR": str(links / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr.rpartition(f"{package}==")[2].strip()


@pytest.mark.parametrize("package", BUILDS)
def test_the_cuda_stack_takes_no_other_build_that_a_folder_of_wheels_offers(tmp_path, package):
    (version,) = CHECKER.pins_of(ROOT / "constraints/gpu.txt")[package]
    for build in ("", "+cpu", "+cu126", "+rocm7.1"):
        name = package.replace("-", "_")
        CHECKER.write_wheel(tmp_path, name, version + build, tag=TAG, needs=())
    assert resolve(tmp_path, "gpu", package) == version


def test_the_cpu_stack_takes_the_cpu_build_of_torch_alone(tmp_path):
    (version,) = CHECKER.pins_of(ROOT / "constraints/gpu.txt")["torch"]
    for build in ("", "+cpu", "+cu126", "+rocm7.1"):
        CHECKER.write_wheel(tmp_path, "torch", version + build, tag=TAG, needs=())
    assert resolve(tmp_path, "cpu", "torch") == f"{version}+cpu"


def test_both_stacks_have_the_same_torch():
    cpu, gpu = (CHECKER.pins_of(ROOT / f"constraints/{one}.txt") for one in ("cpu", "gpu"))
    assert {version.partition("+")[0] for version in cpu["torch"]} == gpu["torch"]


def test_a_version_without_a_line_and_another_version_are_faults():
    (torch,) = CHECKER.pins_of(ROOT / "constraints/gpu.txt")["torch"]
    found = {"torch": f"{torch}+cpu", "unheard-of": "1.0", "six": "1.17.0"}
    assert CHECKER.faults("gpu", found) == [
        "constraints/ has no line for unheard-of==1.0; add one",
        f"would install torch=={torch}+cpu, and constraints/gpu.txt has ['{torch}']",
    ]
    assert CHECKER.faults("gpu", {"torch": torch, "six": "1.17.0"}) == []


def test_the_light_stack_has_the_versions_of_the_cpu_stack():
    pins = CHECKER.pins_of(ROOT / "constraints/cpu.txt")
    found = {name: next(iter(pins[name])) for name in ("pyarrow", "pydantic")}
    assert CHECKER.faults("light", found) == []
    assert CHECKER.faults("light", {"pydantic": "1.0"}) == [
        f"would install pydantic==1.0, and constraints/cpu.txt has {sorted(pins['pydantic'])}"
    ]


@pytest.fixture
def checkout(tmp_path):
    """What setup.sh reads, in a folder of its own."""
    for name in ("scripts", "constraints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file in ROOT.glob("packages/*/pyproject.toml"):
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copy(file, target)
    return tmp_path


def write_python(path: Path, version: str, *, is_supported: bool) -> Path:
    """Write a program that answers setup.sh's two questions as a Python would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    status = int(not is_supported)
    path.write_text(f'#!/bin/sh\ncase "$2" in *exit*) exit {status} ;; *) echo {version} ;; esac\n')
    path.chmod(0o755)
    return path


def run_setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # Only what the scripts call is on this PATH, so the machine's own Pythons are not.
    tools = checkout / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("sh", "cat", "cksum", "dirname", "sed", "grep", "env", "rm", "uname", "tr"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    return subprocess.run(
        [tools / "sh", checkout / "scripts/setup.sh", *arguments],
        env={"PATH": str(tools), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_python_that_is_asked_for_and_does_not_fit_is_refused(checkout, version):
    python = write_python(checkout / "python", version, is_supported=False)
    write_python(checkout / "tools/python3.11", "3.11", is_supported=True)
    done = run_setup(checkout, "cpu", PYTHON=str(python))
    assert done.returncode == 1
    assert f"expected Python 3.11, 3.12 or 3.13, and PYTHON={python} is {version};" in done.stderr


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_without_a_python_that_fits_the_one_that_is_there_is_named(checkout, version):
    write_python(checkout / "tools/python3", version, is_supported=False)
    done = run_setup(checkout, "cpu")
    assert done.returncode == 1
    assert done.stderr == (
        "setup: expected Python 3.11, 3.12 or 3.13, and found none (python3 is "
        f"{version}); install one, or set PYTHON to its path\n"
    )


def test_another_python_than_that_of_the_venv_is_refused(checkout):
    write_python(checkout / ".venv/bin/python", "3.11", is_supported=True)
    python = write_python(checkout / "python", "3.13", is_supported=True)
    done = run_setup(checkout, "cpu", PYTHON=str(python))
    assert done.returncode == 1
    assert ".venv has Python 3.11, and PYTHON=" in done.stderr
    assert "is 3.13; run 'make clean' first, or unset PYTHON" in done.stderr


def test_a_venv_of_a_python_that_does_not_fit_is_refused(checkout):
    write_python(checkout / ".venv/bin/python", "3.14", is_supported=False)
    done = run_setup(checkout, "cpu")
    assert done.returncode == 1
    assert ".venv has 3.14; run 'make clean' first" in done.stderr


def finish_setup(checkout: Path, stack: str) -> None:
    """Leave behind what a set-up does that has nothing more to do."""
    write_python(checkout / ".venv/bin/python", "3.11", is_supported=True)
    inputs = subprocess.run(
        "cat scripts/setup.sh scripts/install_stack.sh scripts/package_index.sh constraints/*.txt"
        " pyproject.toml packages/*/pyproject.toml | cksum",
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (checkout / ".venv/.telescope-setup").write_text(f"{stack} {inputs}\n")


def test_without_a_stack_the_one_of_the_venv_is_kept(checkout):
    """So that `make test` works after `make setup-gpu`."""
    finish_setup(checkout, "gpu")
    assert run_setup(checkout).returncode == 0
    assert run_setup(checkout, "gpu").returncode == 0
    done = run_setup(checkout, "cpu")
    assert done.returncode == 1
    assert done.stderr == "setup: .venv holds the gpu stack; run 'make clean' first\n"


def test_a_set_up_that_was_broken_off_is_of_its_stack(checkout):
    write_python(checkout / ".venv/bin/python", "3.11", is_supported=True)
    broken = run_setup(checkout, "gpu")
    assert broken.returncode
    assert (checkout / ".venv/.telescope-setup").read_text() == "gpu unfinished\n"
    done = run_setup(checkout, "cpu")
    assert done.stderr == "setup: .venv holds the gpu stack; run 'make clean' first\n"


def test_an_unknown_stack_is_refused(checkout):
    done = run_setup(checkout, "cuda")
    assert done.returncode == 1
    assert done.stderr == "setup: expected cpu, gpu or light, got 'cuda'\n"


def test_what_needs_the_trainer_is_not_run_with_the_light_stack(checkout):
    finish_setup(checkout, "light")
    assert run_setup(checkout, "light").returncode == 0
    done = run_setup(checkout)
    assert done.returncode == 1
    assert done.stderr == (
        "setup: expected the cpu or gpu stack, and .venv holds the light one, which has no "
        "trainer; run 'make clean', then 'make setup' (4 GB)\n"
    )
