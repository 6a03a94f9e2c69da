"""trackio: what the real package keeps on this machine is what the run had.

In a process of its own, because trackio takes its folder from the environment when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_train.observability.trackers.tracker import load_tracker

pytestmark = pytest.mark.slow
DEADLINE_S = 300.0
BESIDE = Path(sys.prefix) / "trackio"
"""Where `make setup` puts the package: it does not fit the stack's Pillow by its own account."""
TRACKING = """
import logging
import sys
from pathlib import Path

from telescope_core.records import RunFolder, row_of
from telescope_core.records.timeline import GaugeSample
from telescope_core.types import Message, Rollout
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker
from telescope_train.observability.trackers.tracking import Tracking

logging.basicConfig(level=logging.INFO)
path, begin, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if begin == 1:
    messages = (
        Message(role="user", content="which way?"),
        Message(role="assistant", content="<script>alert(1)</script>"),
    )
    rollout = Rollout(
        environment="maze", example_id="e", group_id="0.0", index=0, messages=messages, reward=0.5
    )
    RunFolder.create(path, config={}).write_rollouts(1, [row_of(rollout, step=1)])
run = TrackedRun(
    name="demo",
    folder=path,
    config={"trainer": {"learning_rate": 0.1}, "env": {"api_key": "s3cret"}},
    first_step=begin,
    options={},
)
told = []
tracking = Tracking({"trackio": load_tracker("trackio")}, run, warn=told.append)
for step in range(begin, end):
    tracking.meter(GaugeSample(time_s=0.0, source="node a", name="cpu/used_share", value=0.25))
    tracking.row({"step": step, "reward/mean": step / 8, "text": "no number"})
tracking.eval_point(begin, "hard", {"pass@1": 0.5})
tracking.close("finished")
assert told == [], told
"""
READING = """
import json

import trackio
from trackio.sqlite_storage import SQLiteStorage

found = [
    {
        "name": run.name,
        "config": run.config,
        "logs": SQLiteStorage.get_logs("telescope", run.name, run_id=run.id),
    }
    for run in trackio.Api().runs("telescope")
]
print(json.dumps(found, default=str))
"""


def python(script: str, folder: Path, *arguments: object) -> str:
    """Run a script that finds trackio, offline; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(BESIDE), *sys.path]),
            "TRACKIO_DIR": str(folder),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    assert "\x1b" not in done.stderr
    if script is TRACKING:
        assert done.stdout == "", "what trackio prints goes into the log"
        assert ":* Trackio metrics logged to:" in done.stderr
    return done.stdout


def test_trackio_reads_back_what_the_run_had_and_a_resumed_run_goes_on(tmp_path: Path):
    place = tmp_path / "trackio"
    python(TRACKING, place, tmp_path / "demo", 1, 3)
    python(TRACKING, place, tmp_path / "other" / "demo", 1, 2)  # a later run of the same name
    python(TRACKING, place, tmp_path / "demo", 3, 4)
    runs = json.loads(python(READING, place).splitlines()[-1])
    assert [one["name"] for one in runs] == ["demo", "demo"]
    steps = [{row["step"] for row in one["logs"] if "reward/mean" in row} for one in runs]
    assert sorted(steps, key=len) == [{1}, {1, 2, 3}]
    found = max(runs, key=lambda one: len(one["logs"]))
    assert found["config"]["trainer"] == {"learning_rate": 0.1}
    assert "s3cret" not in json.dumps(runs)
    logs = found["logs"]
    assert not [name for one in logs for name in one if name.startswith("__")]
    rewards = {one["step"]: one["reward/mean"] for one in logs if "reward/mean" in one}
    assert rewards == {1: 0.125, 2: 0.25, 3: 0.375}
    assert {one["meter/cpu/used_share/max"] for one in logs if "reward/mean" in one} == {0.25}
    evals = [(one["step"], one["eval/hard/pass@1"]) for one in logs if "eval/hard/pass@1" in one]
    assert evals == [(1, 0.5), (3, 0.5)]
    (table,) = [one["rollouts"] for one in logs if "rollouts" in one]
    assert "&lt;script&gt;" in json.dumps(table)
    assert "<script>" not in json.dumps(table)


def test_without_the_package_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError) as caught:
        load_tracker("trackio")
    assert "telescope-train[trackio]" in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("trackio.")]
