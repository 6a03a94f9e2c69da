"""The clouds through their own SDKs, each in a virtual environment of its own, against fakes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from telescope_core.sandboxes.check import CHECKS

pytestmark = pytest.mark.slow
CLOUDS = ("daytona", "e2b", "modal", "prime")
CORE = Path(__file__).parents[4] / "packages/telescope-core"
UV = str(Path(sys.executable).with_name("uv"))


def variable_of(cloud: str) -> str:
    return "MODAL_TOKEN_ID" if cloud == "modal" else f"{cloud.upper()}_API_KEY"


@pytest.fixture(scope="module", params=CLOUDS)
def came(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of a cloud's provider; the SDKs of two clouds do not fit into one environment."""
    cloud = request.param
    folder = tmp_path_factory.mktemp(cloud)
    python = folder / "venv/bin/python"
    for words in (
        ["venv", "--quiet", "--python", sys.executable, folder / "venv"],
        ["pip", "install", "--quiet", "--python", python, "-e", f"{CORE}[{cloud}]"],
    ):
        subprocess.run([UV, *words], check=True, timeout=300)
    program = Path(__file__).with_name("try_provider.py")
    done = subprocess.run(
        # Python says what was not closed.
        [python, "-W", "default::ResourceWarning", program, cloud],
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    unclosed = [line for line in done.stderr.splitlines() if "warning: unclosed" in line.lower()]
    return {"cloud": cloud, "unclosed": unclosed, **json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("check", CHECKS)
def test_contract(came: Any, check: str):
    finding = came["checks"][check]
    assert finding["passed"], finding["said"]


def test_no_sandbox_is_left(came: Any):
    assert came["left"] == []
    assert came["left by a cancelled start"] == []


def test_one_that_could_not_be_ended_is_ended_with_the_provider(came: Any):
    """A service that is away for a moment would bill it until its time is over."""
    assert came["500 close"].startswith(f"SandboxError: {came['cloud']} failed: "), came
    assert came["open after 500 close"] == 1
    assert came["left at the end"] == []


def test_no_connection_is_left(came: Any):
    """But for the pool of E2B's SDK and the client of Modal's, one for the whole process."""
    assert came["cloud"] == "e2b" or len(came["unclosed"]) == (came["cloud"] == "modal")


def test_the_network_is_off_unless_asked_for(came: Any):
    asked = came["created"]
    if came["cloud"] == "daytona":
        assert asked["networkBlockAll"] is True, asked
    elif came["cloud"] == "modal":
        assert asked["block_network"] is True, asked
    elif came["cloud"] == "prime":
        assert asked["network_denylist"] == ["0.0.0.0/0"], asked
    else:
        assert asked["allow_internet_access"] is False, asked


def test_a_service_that_fails_is_a_failure_of_the_provider(came: Any):
    for name in ("500 run", "500 create", "400 run"):
        assert came[name].startswith(f"SandboxError: {came['cloud']} failed: "), came[name]


def test_a_service_that_refuses_what_is_asked_for_says_to_ask_for_something_else(came: Any):
    said = came["400 create"]
    assert said.startswith(f"SandboxLimitError: {came['cloud']} "), said
    assert all(asked in said for asked in ("time_to_live_s=900.0", "network=none")), said
    assert "out of order" in said, "what the service answered"


def test_a_key_that_is_refused_says_which_variable_to_set(came: Any):
    assert came["refused key"].startswith("SandboxUnavailableError"), came["refused key"]
    assert "refuses this account: " in came["refused key"]
    assert f"set {variable_of(came['cloud'])}" in came["refused key"]


def test_a_key_that_is_missing_says_so_and_which_variable_to_set(came: Any):
    said = came["no key"]
    assert said.startswith(f"SandboxUnavailableError: sandbox provider '{came['cloud']}' needs a ")
    assert f"set {variable_of(came['cloud'])}" in said
