"""A disk without room: nothing is half written, the error names the path, and nothing is lost."""

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError, NoRoomError
from telescope_core.evals import EvalFolder
from telescope_core.records import RunFolder, row_log
from telescope_core.records.events import AttemptEvent, EventLog, Stage, read_events
from telescope_core.records.files import append_json_line, read_json, write_json
from telescope_core.records.folders import whole_file, whole_folder
from telescope_core.records.identity import RunState
from telescope_core.records.room import room_for

LIMITED = """
import resource, signal, sys
from pathlib import Path
from telescope_core.errors import NoRoomError
from telescope_core.records import RunFolder
from telescope_core.records.rows import RolloutRow, row_of
from telescope_core.types import Message, Rollout, StopReason

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = RunFolder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
# Text that does not shrink when it is compressed.
text = "".join(chr(33 + (i * i * 7919 + i // 91) % 90) for i in range(200_000))
noise = "".join(f"{hash((i, text[i]))}" for i in range(20_000))
rollout = Rollout(
    environment="e", example_id="x", group_id="g", index=0,
    messages=(Message(role="user", content=noise),), stop_reason=StopReason.COMPLETED,
)
for write in (
    lambda: folder.write_rollouts(2, [row_of(rollout, step=2)]),
    lambda: folder.log_metrics({"step": 2, "text": noise}),
    lambda: folder.write_summary({"text": noise}),
):
    try:
        write()
    except NoRoomError as error:
        print(error)
folder.log_metrics({"step": 3})
"""


@pytest.mark.slow
def test_a_real_limit_on_the_size_of_files_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", config={})
    run.log_metrics({"step": 1})
    run.write_summary({"text": "short"})
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run.path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [str(run.path / name) in line for name, line in zip(NAMES, said, strict=True)] == [
        True,
        True,
        True,
    ]
    assert all("(20,000 bytes); raise the limit with ulimit -f" in line for line in said)
    assert not any("Make room" in line or "free" in line for line in said)
    assert list(run.rollouts_path.iterdir()) == []
    assert [row["step"] for row in run.metrics()] == [1, 3]
    assert run.summary() == {"text": "short"}
    assert [path for path in run.path.rglob("*") if path.name.startswith(".")] == []


NAMES = ("rollouts/step-000002.parquet", "metrics.jsonl", "summary.json")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_path_and_what_is_free(tmp_path: Path, code: int) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"whole": True})

    def write() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("ha")
            raise OSError(code, "no")

    with pytest.raises(NoRoomError) as caught:
        write()
    assert str(path) in str(caught.value)
    assert "MiB are free" in str(caught.value)
    assert read_json(path) == {"whole": True}
    assert [one.name for one in tmp_path.iterdir()] == ["file.json"]
    for error in (OSError(code, "no"), RuntimeError(f"I/O error: no space (os error {code})")):
        with pytest.raises(NoRoomError), room_for(path, RuntimeError):
            raise error
    with pytest.raises(NoRoomError), whole_folder(tmp_path / "model"):
        raise OSError(code, "no")
    assert [one.name for one in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_does_not_keep_the_end_of_a_run_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", config={})
    played = EvalFolder.create(tmp_path / "eval", manifest={"name": "base"})

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", refuse)
        run.fail("NoRoomError: the disk is full")
        played.fail("NoRoomError: the disk is full")
        with pytest.raises(NoRoomError):
            run.fail("no" * 10_000)
    for info in (run.info(), played.info()):
        assert info is not None
        assert (info.state, info.reason) == (RunState.FAILED, "NoRoomError: the disk is full")
    assert played.manifest() == {"name": "base"}
    # What is shorter than the content before it leaves nothing of that.
    run.fail("a longer reason, which comes first")
    with monkeypatch.context() as full:
        full.setattr(os, "replace", refuse)
        run.fail("short")
    assert run.info().reason == "short"


@pytest.mark.parametrize("error", [OSError(errno.EFBIG, "x"), RuntimeError("failed (os error 27)")])
@pytest.mark.parametrize(
    ("most", "advice"),
    [(3 * 2**20, r"\(3\.0 MiB\); raise .* ulimit -f"), (resource.RLIM_INFINITY, "file system")],
)
def test_a_limit_on_the_size_of_files_is_no_full_disk(
    tmp_path: Path,
    error: Exception,
    most: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (most, most))
    with pytest.raises(NoRoomError, match=advice) as caught, room_for(tmp_path / "x", RuntimeError):
        raise error
    assert "free" not in str(caught.value)
    assert "checkpoint" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_name_the_path_and_the_limit(tmp_path: Path, code: int) -> None:
    said = r"cannot write .*x: .* lower --concurrency"
    with pytest.raises(NoRoomError, match=said), whole_file(tmp_path / "x"):
        raise OSError(code, "no")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="it needs a place without folders")
@pytest.mark.parametrize(
    "begin",
    [
        lambda path: RunFolder.create(path, config={}),
        lambda path: RunFolder.begin(path, name="run"),
        lambda path: EvalFolder.create(path, manifest={}),
        lambda path: EvalFolder.create_beside(path / "eval", manifest={}),
        lambda path: write_json(path / "file.json", {}),
    ],
)
def test_a_place_without_folders_is_named(begin) -> None:
    with pytest.raises(ConfigError, match="cannot be made: /proc takes no new folders"):
        begin(Path("/proc/none/out"))


def test_other_failures_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), whole_file(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(RuntimeError), whole_file(tmp_path / "x"):
        raise RuntimeError("something else")


def event(step: int, time_s: float) -> AttemptEvent:
    return AttemptEvent(
        time_s=time_s,
        step=step,
        environment="e",
        group_id=f"{step - 1}.0",
        index=0,
        attempt=1,
        stage=Stage.DRAWN,
    )


async def test_events_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events")
    with monkeypatch.context() as full:

        def fail(path, content):
            raise NoRoomError("full")

        full.setattr(row_log, "append_content", fail)
        log.add(event(1, 1.0))
        log.add(event(2, 2.0))
        for _ in range(2):
            with pytest.raises(NoRoomError):
                log.pack(1)
    log.add(event(1, 3.0))
    log.pack(1)
    log.close()
    assert [one.step for one in read_events(tmp_path / "events")] == [1, 1, 2]


@pytest.mark.slow
async def test_a_slow_disk_does_not_hold_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    append = row_log.append_content

    def slow(path, content):
        begun.set()
        assert may_end.wait(60)
        append(path, content)

    monkeypatch.setattr(row_log, "append_content", slow)
    log = EventLog(tmp_path / "events")
    log.add(event(1, 1.0))
    # The event loop goes on while the write is under way, and so do its events.
    assert await asyncio.to_thread(begun.wait, 60)
    log.add(event(1, 2.0))
    may_end.set()
    await asyncio.to_thread(log.close)
    assert len(read_events(tmp_path / "events")) == 2


def test_a_line_that_found_no_room_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"a": 1})
    path.write_bytes(path.read_bytes() + b'{"cut')
    append_json_line(path, {"b": 2})
    assert [json.loads(line) for line in path.read_text().splitlines() if line[-1] == "}"] == [
        {"a": 1},
        {"b": 2},
    ]


def test_a_refused_file_is_named_without_its_temporary_name(tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(FileNotFoundError) as refused, whole_file(path) as temporary:
        temporary.read_bytes()
    assert refused.value.filename == str(path)
