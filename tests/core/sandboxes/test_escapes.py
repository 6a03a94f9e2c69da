"""Every attack of `attacks.py` is stopped, whoever runs the sandboxes, with and without cgroups."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.core.sandboxes.attacks import ONE_OPENED, TRY

import telescope_core
from telescope_core.sandboxes.local.interpreter import find_interpreter

ORDINARY = 61001
"""A user that no system has; root becomes it for half of the tests."""
IDENTITIES = (
    [
        *("root-groups-forked", "root-watch-forked", "root-groups-started"),
        *("ordinary-watch-forked", "ordinary-watch-started"),
    ]
    if os.getuid() == 0
    else ["ordinary-watch-forked", "ordinary-watch-started"]
)
"""Who runs sandboxes, what holds their memory, and whether a template is forked for each."""


@pytest.fixture(scope="module")
def readable() -> Iterator[Path]:
    """A folder with Telescope's core and the attacks that every user of this machine can read."""
    folder = Path(tempfile.mkdtemp(prefix="telescope-attacks-"))
    try:
        source = Path(telescope_core.__file__).parent
        shutil.copytree(
            source, folder / "telescope_core", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(Path(__file__).with_name("attacks.py"), folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module", params=IDENTITIES)
def came(request: pytest.FixtureRequest, readable: Path) -> dict[str, Any]:
    """What came of each attack, as one of those who may run sandboxes."""
    who, means, beginning = request.param.split("-")
    python, drop = sys.executable, []
    if who == "ordinary" and os.getuid() == 0:
        python = find_interpreter().path
        drop = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]
    done = subprocess.run(
        [*drop, python, "-B", "attacks.py", means.replace("watch", "none"), beginning],
        cwd=readable,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(readable)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert (results["uid"] == 0) == (who == "root")
    expected = "control group" if means == "groups" else "address space"
    assert results["measures"]["memory_mb"].startswith(expected), results["measures"]
    return results


@pytest.mark.parametrize("attack", [*TRY, *ONE_OPENED])
def test_an_attack_is_stopped(came: dict[str, Any], attack: str):
    done = came[attack]
    assert "ESCAPED" not in done["stdout"], done
    assert done["stdout"].startswith("stopped") or done["exit_code"] == 137, done


def test_memory_that_many_processes_hold_together_is_limited(came: dict[str, Any]):
    done = came["memory in many processes"]
    assert done["stop"] == "memory", done
    assert done["stdout"].count("held") < 8, done


def test_a_program_that_ignores_every_signal_ends_at_its_time_limit(came: dict[str, Any]):
    done = came["ignored SIGTERM"]
    assert (done["stop"], done["stdout"]) == ("timeout", "on\n"), done


def test_a_program_cannot_end_its_supervisor(came: dict[str, Any]):
    done = came["kill of everything"]
    assert "ESCAPED" not in done["stdout"], done
    assert done["stop"] == "exited", done


def test_a_flood_of_output_is_counted_and_not_kept(came: dict[str, Any]):
    done = came["output flood"]
    assert done["stop"] == "timeout", done
    assert done["num_dropped_bytes"] > 1_000_000, done


def test_nothing_is_left_running(came: dict[str, Any]):
    """A daemon by a double fork among them."""
    assert came["daemon by double fork"]["stdout"] == "left\n"
    assert came["left"] == []
