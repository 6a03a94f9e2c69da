"""Trackers: what W&B and TensorBoard hold is what the run had, and none of them stops a run."""

import gzip
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.records import RunFolder, row_of
from telescope_core.records.logs import JsonLines
from telescope_core.records.timeline import GaugeSample
from telescope_core.types import Message, Rollout
from telescope_train.observability.trackers import tracking as tracking_module
from telescope_train.observability.trackers.log_uploads import LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker
from telescope_train.observability.trackers.tracking import LOGS_SHARE, Tracking
from telescope_train.plan.load import load_train_config

DEADLINE_S = 120.0
MARKUP = "<script>alert(1)</script> & **bold**"
OPTIONS = {"wandb_project": "telescope", "wandb_tags": ("small",)}


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
        warn=told.append,
        uploads={} if uploads is None else dict.fromkeys(names, uploads),
    )
    for step in steps:
        for source, value in (("node a", 1.0), ("node a", 3.0), ("node b", 6.0)):
            for name in ("cpu/used_share", "vllm/generation_tokens_per_s"):
                time_s = 1000.0 + step
                tracking.meter(GaugeSample(time_s=time_s, source=source, name=name, value=value))
        numbers = {"reward/mean": step / 8, "eval/math/pass@1": 0.5}
        tracking.row({"step": step, **numbers, "text": "no number", "done": True})
    tracking.close("finished")
    return told


def test_tensorboard_reads_back_what_the_run_had(run: TrackedRun, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
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
    meters = {name: values for name, values in found.items() if name.startswith("meter/cpu")}
    assert meters == {
        "meter/cpu/used_share/mean": dict.fromkeys(range(1, 4), 4.0),
        "meter/cpu/used_share/max": dict.fromkeys(range(1, 4), 6.0),
        "meter/cpu/used_share/node a": dict.fromkeys(range(1, 4), 2.0),
        "meter/cpu/used_share/node b": dict.fromkeys(range(1, 4), 6.0),
    }
    assert found["meter/vllm/generation_tokens_per_s/sum"] == dict.fromkeys(range(1, 4), 8.0)
    assert not [name for name in found if name.startswith("gauge/")]
    seconds = {
        event.wall_time: {value.tag: value.simple_value for value in event.summary.value}
        for event in events_of(run.folder / "tensorboard" / "gauges")
        if event.summary.value
    }
    assert list(seconds) == [1001, 1002, 1003]
    assert seconds[1002]["gauge/cpu/used_share/node a"] == 2.0
    assert seconds[1002]["gauge/vllm/generation_tokens_per_s/sum"] == 8.0
    # Its writer changes names, and tells of each, unless it gets them in a record.
    assert found["eval/math/pass@1"] == dict.fromkeys(range(1, 4), 0.5)
    assert "illegal" not in caplog.text
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


@pytest.mark.slow
def test_wandb_keeps_offline_what_the_run_had_and_goes_on_with_its_id(
    run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["telescope", "train", "--env.api_key", "key-of-the-command"])
    repository = tmp_path / "repository"
    remote = "https://token-of-the-remote:x-oauth-basic@host.example/a.git"
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
    for words in (
        ["init", "--quiet", str(repository)],
        ["-C", str(repository), "remote", "add", "origin", remote],
        ["-C", str(repository), "commit", "--quiet", "--allow-empty", "--message", "first"],
    ):
        subprocess.run(["git", *who, *words], check=True, timeout=60)
    monkeypatch.chdir(repository)
    assert track(["wandb"], run, range(1, 3)) == []
    # Meanwhile the clock is set back, or the run goes on where it is behind.
    known = json.loads((run.folder / "wandb.json").read_text())
    (run.folder / "wandb.json").write_text(json.dumps({**known, "time_s": known["time_s"] + 3600}))
    assert track(["wandb"], run, range(3, 4)) == []
    records = whole_files(run.folder, num_files=2)
    assert "key-of-the-command" not in json.dumps(records)
    assert "token-of-the-remote" not in json.dumps(records)
    runs = [one["run"] for one in records if one["type"] == "run"]
    assert len(runs[0]["git"]["commit"]) == 40
    assert len({one["run_id"] for one in runs}) == 1
    assert {one["project"] for one in runs} == {"telescope"}
    assert runs[0]["tags"] == ["small"]
    assert runs[0]["display_name"] == "demo"
    config = runs[0]["config"]["update"]
    assert config["trainer"] == {"learning_rate": 0.1}
    assert config["env"] == {"api_key": "(left out)"}
    history = [one["history"]["item"] for one in records if one["type"] == "history"]
    rows = [one for one in history if "reward/mean" in one]
    assert [one["reward/mean"] for one in rows] == [0.125, 0.25, 0.375]
    assert [one["meter/cpu/used_share/max"] for one in rows] == [6.0, 6.0, 6.0]
    assert [one["step"] for one in rows] == [1, 2, 3]
    gauges = [one for one in history if "gauge/time_s" in one]
    assert [one["gauge/time_s"] for one in gauges] == [1001, 1002, 1003]
    assert [one["gauge/cpu/used_share/node b"] for one in gauges] == [6.0, 6.0, 6.0]
    axes = {
        one["metric"]["name"]: one["metric"].get("step_metric")
        for one in records
        if one["type"] == "metric" and "name" in one["metric"]
    }
    assert axes["gauge/cpu/used_share/max"] == "gauge/time_s"
    # W&B drops what comes with a lower number than it had.
    numbers = [one["_step"] for one in history]
    assert numbers == sorted(numbers)
    assert [one["rollouts.nrows"] for one in history if "rollouts.nrows" in one] == [1]


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


@pytest.mark.slow
def test_wandb_gets_the_logs_that_are_asked_for(
    run: TrackedRun, logged: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    uploads = LogUploads(
        folder=logged, has_logs=True, has_output=True, secrets=frozenset({"s3cret"})
    )
    assert track(["wandb"], run, range(1, 2), uploads) == []
    records = whole_files(run.folder, num_files=1)
    listed = {
        item["path"] for one in records if one["type"] == "files" for item in one["files"]["files"]
    }
    assert {"logs/driver.jsonl.gz", "logs/inference-0.log.gz"} <= listed
    (files,) = run.folder.glob("wandb/offline-run-*/files/logs")
    packed = {path.name: gzip.decompress(path.read_bytes()) for path in files.iterdir()}
    assert packed["inference-0.log.gz"] == b"ready\nthe key is (left out), \xff\n"
    rows = [json.loads(line) for line in packed["driver.jsonl.gz"].splitlines()]
    assert [row["message"][:8] for row in rows] == ["number 0", "number 2", "number 4"]
    assert all(path.is_file() and not path.is_symlink() for path in files.iterdir())


def test_which_logs_are_packed_is_chosen(logged: Path, tmp_path: Path):
    def packed(**chosen: bool) -> dict[str, int]:
        paths = LogUploads(folder=logged, **chosen).pack(tmp_path).paths
        return {path.name: gzip.decompress(path.read_bytes()).count(b"\n") for path in paths}

    assert packed() == {}
    assert packed(has_logs=True) == {"driver.jsonl.gz": 3}
    assert packed(has_debug=True) == {"driver.jsonl.gz": 6}
    assert packed(has_output=True) == {"inference-0.log.gz": 2}


def test_logs_are_packed_again_only_when_there_is_more_in_them(logged: Path, tmp_path: Path):
    uploads = LogUploads(folder=logged, has_logs=True, has_output=True)
    first = uploads.pack(tmp_path)
    assert [path.name for path in first.paths] == ["driver.jsonl.gz", "inference-0.log.gz"]
    assert uploads.pack(tmp_path, first.sizes).paths == []
    with (logged / "inference-0.log").open("a") as log:
        log.write("more\n")
    again = uploads.pack(tmp_path, first.sizes)
    assert [path.name for path in again.paths] == ["inference-0.log.gz"]


@pytest.mark.slow
def test_logs_are_sent_while_the_run_goes_on(
    run: TrackedRun, logged: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a run that is killed has sent is all that there is."""
    monkeypatch.setattr(tracking_module, "LOGS_EVERY_S", 0.01)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking = Tracking(
        {"wandb": load_tracker("wandb")},
        run,
        warn=lambda text: None,
        uploads={"wandb": LogUploads(folder=logged, has_logs=True)},
    )

    def sent() -> int:
        """Return the lines of the driver's log that W&B has."""
        files = list(run.folder.glob("wandb/offline-run-*/files/logs/driver.jsonl.gz"))
        return sum(gzip.decompress(path.read_bytes()).count(b"\n") for path in files)

    give_up_s = time.monotonic() + DEADLINE_S
    while sent() < 3:
        assert time.monotonic() < give_up_s
    with (logged / "driver.jsonl").open("a") as log:
        log.write('{"time_s":1.0,"level":"info","message":"later"}\n')
    while sent() < 4:
        assert time.monotonic() < give_up_s
    tracking.close("finished")


class SetClock:
    """A clock that tells what it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """Return its time."""
        return self.now_s


def test_logs_that_take_long_are_sent_rarely(
    run: TrackedRun, logged: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, took_s = SetClock(), 100.0
    monkeypatch.setattr(tracking_module, "time", clock)
    monkeypatch.setattr(tracking_module, "LOGS_EVERY_S", 1000.0)
    sent = threading.Semaphore(0)
    tracker = Failing()

    def take(paths: Any) -> None:
        clock.now_s += took_s
        with (logged / "driver.jsonl").open("a") as log:
            log.write("{}\n")
        sent.release()

    tracker.log_files = take  # type: ignore[method-assign]
    uploads = {"one": LogUploads(folder=logged, has_logs=True)}
    tracking = Tracking({"one": tracker}, run, warn=print, uploads=uploads)

    def step(number: int) -> None:
        tracking.row({"step": number})
        give_up_s = time.monotonic() + DEADLINE_S
        while number not in tracker.steps:
            assert time.monotonic() < give_up_s

    def after(seconds: float, number: int) -> None:
        clock.now_s += seconds
        # The second one comes once the logs would have been sent after the first.
        step(number)
        step(number + 1)

    after(999.0, 11)
    assert not sent.acquire(blocking=False)
    after(1.0, 21)
    assert sent.acquire(timeout=DEADLINE_S)
    after(took_s / LOGS_SHARE - 1, 31)
    assert not sent.acquire(blocking=False)
    after(1.0, 41)
    assert sent.acquire(timeout=DEADLINE_S)
    tracking.close("finished")


def test_logs_that_are_not_taken_are_said_once_and_the_tracker_ends(run: TrackedRun, logged: Path):
    told: list[str] = []
    failing, other = Failing(), Failing()
    uploads = {"one": LogUploads(folder=logged, has_logs=True)}
    tracking = Tracking({"one": failing, "other": other}, run, warn=told.append, uploads=uploads)
    tracking.row({"step": 1})
    tracking.close("failed")
    (text,) = told  # though it is asked again at the end
    assert "the tracker one did not take the logs of the run: ConnectionError: no room" in text
    assert str(logged) in text
    assert (failing.steps, failing.ended, other.ended) == ([1], "failed", "failed")


def whole_files(folder: Path, *, num_files: int) -> list[dict[str, Any]]:
    """Return the records of a run's files, once W&B's own process has written their ends."""
    give_up_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_s:
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        records = [record for path in files for record in read(path)]
        ends = [one for one in records if one["type"] == "exit"]
        if len(ends) == num_files:
            return records
    raise AssertionError(f"after {DEADLINE_S} s there are {len(ends)} ends in {len(files)} files")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a W&B file, as W&B's own reader tells them."""
    wandb = (sys.executable, "-m", "wandb")
    done = subprocess.run(
        [*wandb, "leet", "inspect", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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

    def log_gauges(self, time_s: int, row: Any) -> None:
        """Take gauges."""

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
    tracking = Tracking({"one": failing, "other": other}, run, warn=told.append)
    for step in range(1, 5):
        tracking.row({"step": step})
    tracking.close("finished")
    (text,) = told
    assert "the tracker one is left out from now on: ConnectionError: the service is away" in text
    assert failing.steps == [1]
    assert other.steps == [1, 2, 3, 4]
    assert other.ended == "finished"


def test_a_tracker_that_ends_by_an_interrupt_of_its_own_is_said_too(run: TrackedRun):
    """W&B raises it where the input for its question ends."""

    def begin(run: TrackedRun) -> None:
        raise KeyboardInterrupt

    told: list[str] = []
    failing = Failing()
    failing.begin = begin  # type: ignore[method-assign]
    Tracking({"one": failing}, run, warn=told.append).close("finished")
    (text,) = told
    assert "the tracker one is left out from now on: KeyboardInterrupt" in text


def test_a_tracker_that_hangs_holds_up_nothing(run: TrackedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking_module, "MOST_WAITING", 3)
    monkeypatch.setattr(tracking_module, "END_S", 0.05)
    let_go = threading.Event()
    hanging = Failing()
    hanging.begin = lambda run: let_go.wait(DEADLINE_S)  # type: ignore[method-assign,assignment]
    told: list[str] = []
    tracking = Tracking({"one": hanging}, run, warn=told.append)
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
    begun = threading.Event()

    def end(state: str) -> None:
        begun.set()
        let_go.wait(DEADLINE_S)

    hanging.end = end  # type: ignore[method-assign]
    told: list[str] = []
    tracking = Tracking({"one": hanging}, run, warn=told.append)
    tracking.row({"step": 1})
    tracking.close("finished")
    (text,) = told
    assert "one" in text.split()
    assert begun.wait(DEADLINE_S)
    assert hanging.steps == [1], "what came before has been sent"
    let_go.set()


def test_an_unknown_tracker_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="'wandb'"):
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
    ("line", "facts", "needed"),
    [
        ('wandb_project = "mine"', "wandb_project.*use_wandb", "use_wandb = true"),
        ("wandb_upload_logs_stdout = true", "wandb_upload.*use_wandb", "use_wandb = true"),
        ('prometheus_host = "0.0.0.0"', "prometheus_host.*prometheus_port", "prometheus_port = 0"),
        (
            "[inference]\notlp_receiver_port = 4318",
            "otlp_receiver_port.*enable_vllm_tracing",
            "enable_vllm_tracing = true",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    tmp_path: Path, line: str, facts: str, needed: str
):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS + line)
    with pytest.raises(ConfigError, match=facts):
        load_train_config([path], [])
    path.write_text(f"{SETTINGS}{line}\n{needed}\n")
    assert load_train_config([path], []).run.name == "demo"


def test_trackers_of_settings_are_known(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS + 'trackers = ["trackoi"]')
    with pytest.raises(ConfigError, match=r"'trackoi'.*'trackio'"):
        load_train_config([path], [])
    path.write_text(SETTINGS + "use_tensorboard = true")
    assert load_train_config([path], []).observability.use_tensorboard
