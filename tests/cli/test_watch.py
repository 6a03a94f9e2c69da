"""`telescope watch`: a run of another process, from its first step to its end."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.processes import Program

from telescope_cli.main import main
from telescope_cli.watch import run_names
from telescope_core.records import RunFolder, RunState
from telescope_core.records.files import write_json
from telescope_core.records.restarts import Restart
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState

DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of this process, which goes on."""
    monkeypatch.chdir(tmp_path)
    config = {"run": {"number_of_steps": 4}, "environments": [{"name": "maze"}]}
    return RunFolder.create(Path("runs/demo"), config=config, name="demo")


@pytest.mark.parametrize("name", ["demo-2", "other"])
@pytest.mark.parametrize("has_runs", [True, False])
def test_a_run_without_a_folder_may_have_just_been_started(
    name, has_runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if has_runs:
        RunFolder.create(Path("runs/demo"), config={}, name="demo")
    with pytest.raises(SystemExit) as ended:
        main(["watch", name])
    assert ended.value.code == 2
    assert "just started has no folder for some seconds" in capsys.readouterr().err


def row(step: int) -> dict[str, float]:
    return {"step": step, "reward/mean": step / 8, "reward/maze/mean": step / 8}


@contextmanager
def watching(place: Path, *arguments: str) -> Iterator["queue.Queue[str]"]:
    """Watch in another process; yields the lines that it prints."""
    code = "from telescope_cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "watch", *arguments],
        cwd=place,
        env={**os.environ, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    reading = threading.Thread(
        target=lambda stream: [lines.put(line) for line in stream], args=(process.stdout,)
    )
    reading.start()
    try:
        yield lines
        lines.put(f"exit {process.wait(DEADLINE_S)}")
    finally:
        process.kill()
        process.wait()
        reading.join(DEADLINE_S)
        process.stdout.close()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the run does between two looks of the command in this process, one after another."""
    happens: list[Callable[[], object]] = []
    clock = SimpleNamespace(sleep=lambda seconds: happens.pop(0)())
    monkeypatch.setattr("telescope_cli.watch.time", clock)
    return happens


def damage(folder: RunFolder) -> None:
    """Append lines to the files of events that are objects, but no events."""
    for name in ("servers.jsonl", "restarts.jsonl", "eval_points.jsonl"):
        with (folder.path / name).open("a") as stream:
            stream.write('{}\n{"time_s": "late"}\nnull\n')


def test_a_person_sees_steps_losses_and_the_end(
    folder: RunFolder, meanwhile, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    folder.log_metrics(row(1))
    lost = ServerEvent(
        time_s=1.0,
        server="http://a",
        role=ServerRole.ROLLOUT,
        life=1,
        state=ServerState.LOST,
        version=2,
        reason="killed by signal 9",
    )
    back = Restart(time_s=1.0, reason="rank 0 died", reached=2, step=1, checkpoint="c")
    meanwhile += [
        lambda: folder.log_metrics(row(2)),
        lambda: damage(folder),
        lambda: folder.log_server(lost),
        lambda: folder.go_back(back),
        lambda: folder.log_metrics(row(2) | {"reward/mean": 0.75}),
        lambda: folder.fail("the disk is full"),
    ]
    code, text = run(capsys, "demo")
    assert code == 1
    # What was done before the restart is not told again.
    assert (text.count("step 1/4"), text.count("step 2/4")) == (0, 2)
    told = ["watching runs/demo", "step 2/4 reward 0.250", "http://a lost: killed by signal 9"]
    told += ["rank 0 died", "step 2/4 reward 0.750"]
    told += ["run demo failed after step 2: the disk is full"]
    places = [text.index(one) for one in told]
    assert places == sorted(places)
    assert meanwhile == []


def test_a_program_gets_everything_as_objects(folder: RunFolder, meanwhile, capsys):
    folder.log_metrics(row(1))
    meanwhile += [lambda: folder.log_metrics(row(2)), folder.finish]
    code, text = run(capsys, "runs/demo", "--json")
    assert code == 0
    assert [json.loads(line) for line in text.splitlines()] == [
        {"kind": "step", **row(1)},
        {"kind": "step", **row(2)},
        {"kind": "end", "state": "finished", "reason": ""},
    ]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "telescope: interrupted by SIGTERM\n"),
        (signal.SIGHUP, "telescope: interrupted by SIGHUP\n"),
        (signal.SIGINT, ""),
    ],
)
def test_a_signal_ends_the_view_and_says_nothing_that_sounds_like_the_run(
    folder: RunFolder, meanwhile, capsys, number: signal.Signals, words: str
):
    # As a shell leaves it, whatever this process was started with.
    before = signal.signal(number, signal.SIG_DFL)
    meanwhile += [lambda: signal.raise_signal(number)]
    try:
        with pytest.raises(SystemExit) as ended:
            main(["watch", "demo", "--json"])
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == words
    assert folder.info().state is RunState.RUNNING


@pytest.mark.slow
def test_a_run_of_another_process_is_watched_while_it_goes_on(folder: RunFolder, tmp_path: Path):
    folder.log_metrics(row(1))
    with watching(tmp_path, "runs/demo", "--json") as lines:
        assert json.loads(lines.get(timeout=DEADLINE_S)) == {"kind": "step", **row(1)}
        folder.log_metrics(row(2))
        assert json.loads(lines.get(timeout=DEADLINE_S)) == {"kind": "step", **row(2)}
        folder.finish()
        end = {"kind": "end", "state": "finished", "reason": ""}
        assert json.loads(lines.get(timeout=DEADLINE_S)) == end
    assert lines.get(timeout=DEADLINE_S) == "exit 0"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["watch", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_a_run_that_was_killed_is_told_as_that(folder: RunFolder, capsys):
    begun = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
    folder.log_metrics({**row(3), "time_s": begun.timestamp() + 75})
    info = json.loads((folder.path / "run.json").read_text())
    with Program([sys.executable, "-c", ""]) as gone:
        gone.wait()
    write_json(folder.path / "run.json", {**info, "pid": gone.pid, "started_at": begun.isoformat()})
    code, text = run(capsys, "demo")
    assert code == 1
    # As long as it went on, and not until now.
    assert "0:01:15 watching" in text
    assert f"run demo interrupted after step 3: process {gone.pid} ended without" in text
    assert "The run was interrupted at step 3" in text
    # What is shown is how long it has gone on since it was resumed, as in its own terminal.
    info = json.loads((folder.path / "run.json").read_text())
    later = {"at": "2026-01-01T00:01:00+00:00", "step": 1, "checkpoint": "step-1"}
    write_json(folder.path / "run.json", {**info, "resumes": [later]})
    code, text = run(capsys, "demo")
    assert "0:00:15 watching" in text
    code, text = run(capsys, "demo", "--json")
    assert str(gone.pid) in json.loads(text.splitlines()[-1])["reason"]


def test_the_end_is_wrapped_between_words_for_a_person_and_whole_for_a_program(
    folder: RunFolder, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "the disk is full " * 8
    info = json.loads((folder.path / "run.json").read_text())
    write_json(folder.path / "run.json", {**info, "state": "failed", "reason": reason.strip()})
    _, text = run(capsys, "demo")
    assert reason.strip() in text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, text = run(capsys, "demo")
    end = text[text.index("run demo failed") :].splitlines()
    assert len(end) > 2
    assert all(len(line) <= 80 for line in end)
    assert reason.strip() in " ".join(end)


def test_a_run_whose_folder_has_another_name_is_told_with_it(folder: RunFolder, capsys):
    folder.fail("the disk is full")
    folder.path.rename(folder.path.with_name("other"))
    assert "run demo (runs/other) failed after step 0" in run(capsys, "other")[1]


def test_lines_of_metrics_without_a_step_are_left_out(folder: RunFolder, capsys):
    folder.log_metrics(row(1))
    with (folder.path / "metrics.jsonl").open("a") as stream:
        stream.write('{}\n{"step": "abc"}\n{"step": null}\n{"step": true}\n')
    folder.fail("the disk is full")
    assert run(capsys, "demo")[0] == 1
    told = run(capsys, "demo", "--json")[1].splitlines()
    assert [json.loads(one).get("step") for one in told] == [1, None]


def test_a_finished_run_is_shown_with_its_summary(folder: RunFolder, capsys):
    folder.log_metrics(row(4))
    folder.write_summary(
        {"name": "demo", "rewards": [0.1, 0.5], "first_mean": 0.1, "last_mean": 0.5}
    )
    folder.finish()
    code, text = run(capsys, "demo")
    assert code == 0
    assert "run demo finished" in text
    assert "Too early to tell: 4 steps done" in text


def test_a_run_that_was_moved_is_shown_with_the_places_of_today(folder: RunFolder, capsys):
    gone = {"export": "gone/checkpoints/final/hf", "report": "gone/report.html"}
    folder.write_summary({"name": "demo", "rewards": [0.5], **gone})
    folder.finish()
    assert "gone" not in run(capsys, "demo")[1]
    report = folder.path / "report.html"
    report.touch()
    assert f"report: {report}" in run(capsys, str(folder.path))[1]


def test_names_that_a_shell_would_run_are_not_offered(folder: RunFolder):
    for name in (r"\$(touch it)", "`touch it`", '"; touch it; "', "it'", "demo 2", "d\u00e9mo"):
        RunFolder.create(Path("runs") / name, config={})
    assert run_names("") == ["demo", "demo 2", "d\u00e9mo"]
    assert run_names("demo ") == ["demo 2"]


def test_a_name_that_is_misspelt_lists_the_nearest(folder: RunFolder, capsys):
    code, text = run(capsys, "demmo")
    assert code != 0
    assert "did you mean 'demo'?" in text


def test_without_any_run_the_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, text = run(capsys, "demo")
    assert code != 0
    assert "no run in runs" in text
