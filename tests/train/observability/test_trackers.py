"""Trackers: what W&B and TensorBoard hold is what the run had, and none of them stops a run."""

import gzip
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder, row_of
from telescope_core.records.logs import JsonLines
from telescope_core.records.timeline import GaugeSample
from telescope_core.types import Message, Rollout
from telescope_train.observability.trackers import tracking as tracking_module
from telescope_train.observability.trackers.log_uploads import LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker
from telescope_train.observability.trackers.tracking import Tracking, without_secrets
from telescope_train.plan.load import load_train_config

DEADLINE_S = 60.0
MARKUP = "<script>alert(1)</script> & **bold**"
OPTIONS = {"wandb_project": "telescope", "wandb_run_name": None, "wandb_tags": ("small",)}


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    """A run with one rollout in its first step."""
    folder = RunFolder.create(tmp_path / "demo", config={})
    rollout = Rollout(
        environment="maze",
        example_id="e",
        group_id="0.0",
        index=0,
        messages=(
            Message(role="user", content="which way?"),
            Message(role="assistant", content=MARKUP),
        ),
        reward=0.5,
    )
    folder.write_rollouts(1, [row_of(rollout, step=1)])
    return TrackedRun(
        name="demo",
        folder=folder.path,
        config={"trainer": {"learning_rate": 0.1}, "env": {"api_key": "s3cret"}},
        first_step=1,
        options=OPTIONS,
    )


def track(
    names: list[str], run: TrackedRun, steps: range, uploads: LogUploads | None = None
) -> list[str]:
    """Tell trackers of steps; returns what a person was told."""
    told: list[str] = []
    tracking = Tracking(
        {name: load_tracker(name) for name in names},
        run,
        say=told.append,
        uploads={} if uploads is None else dict.fromkeys(names, uploads),
    )
    for step in steps:
        for value in (1.0, 3.0):
            tracking.meter(GaugeSample(time_s=0.0, source="a", name="cpu/used_share", value=value))
        tracking.row({"step": step, "reward/mean": step / 8, "text": "no number", "done": True})
    tracking.close("finished")
    return told


def test_tensorboard_reads_back_what_the_run_had(run: TrackedRun):
    assert track(["tensorboard"], run, range(1, 4)) == []
    found: dict[str, dict[int, float]] = {}
    texts: list[str] = []
    for event in events_of(run.folder / "tensorboard"):
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts.append(value.tensor.string_val[0].decode())
            else:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["reward/mean"] == {1: 0.125, 2: 0.25, 3: 0.375}
    assert found["meter/cpu/used_share"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert "text" not in found
    (text,) = texts
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


def events_of(folder: Path) -> list[Any]:
    """Read event files: records of a length, its checksum, the event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: list[Any] = []
    for path in folder.glob("events.*"):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[12 + size + 4 :]
    return found


def test_wandb_keeps_offline_what_the_run_had_and_goes_on_with_its_id(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert track(["wandb"], run, range(1, 3)) == []
    assert track(["wandb"], run, range(3, 4)) == []
    records = whole_files(run.folder, num_files=2)
    runs = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1
    assert {one.project for one in runs} == {"telescope"}
    assert list(runs[0].tags) == ["small"]
    assert runs[0].display_name == "demo"
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert "0.1" in config["trainer"]
    assert not any("s3cret" in value for value in config.values())
    found: dict[str, list[str]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append(item.value_json)
    assert found["reward/mean"] == ["0.125", "0.25", "0.375"]
    # W&B drops what comes with a lower number than it had.
    assert found["_step"] == ["1", "2", "3"]
    assert found["rollouts/nrows"] == ["1"]


@pytest.fixture
def logged(run: TrackedRun) -> Path:
    """The logs of a run, one of which was full."""
    folder = run.folder / "logs"
    driver = JsonLines(folder / "driver.jsonl", component="driver", max_bytes=400)
    for number in range(6):
        level = logging.DEBUG if number % 2 else logging.INFO
        text = f'number {number} "level":"debug"'
        driver.handle(logging.LogRecord("x", level, "x.py", 1, text, None, None))
    assert (folder / "driver.1.jsonl").exists()
    (folder / "inference-0.log").write_bytes(b"ready\nthe key is s3cret, \xff\n")
    return folder


def test_wandb_gets_the_logs_that_are_asked_for(
    run: TrackedRun, logged: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    uploads = LogUploads(
        folder=logged, has_logs=True, has_output=True, secrets=frozenset({"s3cret"})
    )
    assert track(["wandb"], run, range(1, 2), uploads) == []
    records = whole_files(run.folder, num_files=1)
    listed = {item.path for one in records for item in one.files.files}
    assert {"logs/driver.jsonl.gz", "logs/inference-0.log.gz"} <= listed
    (files,) = run.folder.glob("wandb/offline-run-*/files/logs")
    packed = {path.name: gzip.decompress(path.read_bytes()) for path in files.iterdir()}
    assert packed["inference-0.log.gz"] == b"ready\nthe key is (left out), \xff\n"
    rows = [json.loads(line) for line in packed["driver.jsonl.gz"].splitlines()]
    assert [row["message"][:8] for row in rows] == ["number 0", "number 2", "number 4"]
    assert all(path.is_file() and not path.is_symlink() for path in files.iterdir())


def test_which_logs_are_packed_is_chosen(logged: Path, tmp_path: Path):
    def packed(**chosen: bool) -> dict[str, int]:
        paths = LogUploads(folder=logged, **chosen).pack(tmp_path)
        return {path.name: gzip.decompress(path.read_bytes()).count(b"\n") for path in paths}

    assert packed() == {}
    assert packed(has_logs=True) == {"driver.jsonl.gz": 3}
    assert packed(has_debug=True) == {"driver.jsonl.gz": 6}
    assert packed(has_output=True) == {"inference-0.log.gz": 2}


def test_logs_that_are_not_taken_are_said_once_and_the_tracker_ends(run: TrackedRun, logged: Path):
    told: list[str] = []
    failing, other = Failing(), Failing()
    uploads = {"one": LogUploads(folder=logged, has_logs=True)}
    tracking = Tracking({"one": failing, "other": other}, run, say=told.append, uploads=uploads)
    tracking.row({"step": 1})
    tracking.close("failed")
    (text,) = told
    assert "the tracker one did not take the logs of the run: ConnectionError: no room" in text
    assert str(logged) in text
    assert (failing.steps, failing.ended, other.ended) == ([1], "failed", "failed")


def whole_files(folder: Path, *, num_files: int) -> list[Any]:
    """Return the records of a run's files, once W&B's own process has written their ends."""
    give_up_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_s:
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        records = [record for path in files for record in read(path)]
        ends = [one for one in records if one.WhichOneof("record_type") == "exit"]
        if len(ends) == num_files:
            return records
    raise AssertionError(f"after {DEADLINE_S} s there are {len(ends)} ends in {len(files)} files")


BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7


def read(path: Path) -> list[Any]:
    """Return the records of a W&B file: a log in LevelDB's format, behind a header of 7 bytes.

    Each piece of a record has a checksum, its length and what it is: 1 = a whole record, 2 = the
    first piece, 3 = one in between, 4 = the last one.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, found, pieces = path.read_bytes(), [], b""
    position = HEADER_BYTES
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += HEADER_BYTES
        pieces += content[position : position + size]
        position += size
        if kind in (1, 4):
            found.append(Record.FromString(pieces))
            pieces = b""
    return found


class Failing:
    """A tracker whose second step fails."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended = ""

    def begin(self, run: TrackedRun) -> None:
        """Begin."""

    def log_metrics(self, step: int, row: Any) -> None:
        if step == 2:
            raise ConnectionError("the service is away")
        self.steps.append(step)

    def log_rollouts(self, step: int, rows: Any) -> None:
        """Take rollouts."""

    def log_files(self, paths: Any) -> None:
        raise ConnectionError("no room for files")

    def end(self, state: str) -> None:
        self.ended = state


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(run: TrackedRun):
    told: list[str] = []
    failing, other = Failing(), Failing()
    other.log_metrics = lambda step, row: other.steps.append(step)  # type: ignore[method-assign]
    tracking = Tracking({"one": failing, "other": other}, run, say=told.append)
    for step in range(1, 5):
        tracking.row({"step": step})
    tracking.close("finished")
    (text,) = told
    assert "the tracker one is left out from now on: ConnectionError: the service is away" in text
    assert failing.steps == [1]
    assert other.steps == [1, 2, 3, 4]
    assert other.ended == "finished"


def test_a_tracker_that_hangs_holds_up_nothing(run: TrackedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking_module, "MOST_WAITING", 3)
    monkeypatch.setattr(tracking_module, "END_S", 0.05)
    let_go = threading.Event()
    hanging = Failing()
    hanging.begin = lambda run: let_go.wait(DEADLINE_S)  # type: ignore[method-assign,assignment]
    told: list[str] = []
    tracking = Tracking({"one": hanging}, run, say=told.append)
    for step in range(1, 9):
        tracking.row({"step": step})
    tracking.close("finished")
    (text,) = told
    assert "messages behind" in text
    let_go.set()


def test_a_tracker_that_is_slow_at_the_end_is_waited_for_a_while(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking_module, "END_S", 0.05)
    let_go = threading.Event()
    hanging = Failing()
    hanging.end = lambda state: let_go.wait(DEADLINE_S)  # type: ignore[method-assign,assignment]
    told: list[str] = []
    tracking = Tracking({"one": hanging}, run, say=told.append)
    tracking.close("finished")
    (text,) = told
    assert "not sent everything" in text
    let_go.set()


def test_what_may_be_a_secret_leaves_no_machine():
    settings = {
        "max_tokens": 5,
        "env": {"api_key": "s", "hf_token": "s", "level": "digit"},
        "environments": [{"name": "maze", "env": {"secret": "s"}}],
    }
    assert without_secrets(settings) == {
        "max_tokens": 5,
        "env": {"api_key": "(left out)", "hf_token": "(left out)", "level": "digit"},
        "environments": [{"name": "maze", "env": {"secret": "(left out)"}}],
    }


def test_an_unknown_tracker_lists_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        load_tracker("wandbb")


SETTINGS = """
[run]
name = "demo"
number_of_steps = 3
[model]
model = "none"
[[environments]]
name = "maze"
[observability]
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('wandb_project = "mine"', "no effect without use_wandb"),
        ("wandb_upload_logs_stdout = true", "no effect without use_wandb"),
        ('prometheus_host = "0.0.0.0"', "no effect without prometheus_port"),
        ('trackers = ["trackoi"]', "unknown tracker 'trackoi'"),
        ("[inference]\notlp_receiver_port = 4318", "no effect without enable_vllm_tracing"),
        ("use_tensorboard = true", None),
        ("prometheus_port = 0\nprometheus_host = '0.0.0.0'", None),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    tmp_path: Path, line: str, expected: str | None
):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS + line)
    if expected is None:
        load_train_config([path], [])
        return
    with pytest.raises(ConfigError, match=expected):
        load_train_config([path], [])
