"""The stack without the trainer: it measures an environment, and says what is not in it."""

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.envs.circle import Engine, one_answer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    """A virtual environment with what `make setup-light` installs."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    command = [ROOT / "scripts/install_stack.sh", "light", "install", "--quiet", "--python", python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def engine(light) -> Iterator[Engine]:
    """A model folder, and an endpoint that gives every prompt one answer."""
    with one_answer(light) as engine:
        yield engine


def telescope(light: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [light / "venv/bin/telescope", *arguments],
        cwd=light,
        env={**os.environ, "TELESCOPE_HOME": str(light / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_environment_is_installed_and_a_model_behind_an_endpoint_measured(light, engine):
    registry = ("--registry", str(ROOT / "registry"))
    done = telescope(light, "env", "install", "countdown", *registry)
    assert done.returncode == 0, done.stderr
    shape = ("--base-url", engine.base_url, "--examples", "4", "--rollouts", "1")
    done = telescope(light, "eval", "countdown", *shape)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 rollouts scored" in done.stdout
    (result,) = (light / "runs/evals").iterdir()
    done = telescope(light, "eval", "compare", str(result), str(result), "--json")
    assert done.returncode == 0, done.stderr
    assert telescope(light, "ui", "--help").returncode == 0


@pytest.mark.parametrize("verb", ["train", "sft", "simulate", "export", "model", "watch"])
def test_what_needs_the_trainer_says_so(light, verb):
    done = telescope(light, verb)
    assert done.returncode == 2
    assert "needs telescope-train, which is not installed" in done.stderr


def test_a_model_folder_needs_the_trainer(light, engine):
    done = telescope(light, "eval", "countdown", "--model", str(engine.model))
    assert done.returncode == 2
    assert "or give --base-url of an endpoint" in done.stderr


def test_nothing_of_the_trainer_is_there(light):
    installed = {path.name for path in light.glob("venv/lib/*/site-packages/*")}
    assert not {"torch", "vllm", "ray", "transformers"} & installed
    assert "pyarrow" in installed
