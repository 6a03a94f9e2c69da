"""What happens to a run folder while it is shown: it grows, goes back, is killed, is deleted."""

import asyncio
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue

import pytest
from tests.processes import Program
from tests.ui.recorded import kill, write_standalone, write_steps
from tests.ui.served import LIMIT_S, TOKEN, answered, served

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.records.restarts import Restart
from telescope_ui.files.database import Database
from telescope_ui.index.run_index import RunIndex
from telescope_ui.index.runs import Runs
from telescope_ui.web.live import LOOK_S, Watcher, state_of

WEB = Path(__file__).resolve().parents[2] / "packages" / "telescope-ui" / "web"


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 4), groups=1)
    return run


class Events:
    """Server-sent events of one page."""

    def __init__(self, ui, address="/live"):
        self._connection = http.client.HTTPConnection("127.0.0.1", ui.port, timeout=LIMIT_S)
        self._connection.request("GET", address, headers={"authorization": f"Bearer {TOKEN}"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.next("ready")

    def next(self, part):
        """Return the data of the next event that tells of `part`, or of runs."""
        event = ""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            line = self._answer.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if part in (event, *data.get("parts", ())):
                    return data
        raise AssertionError(f"nothing was told of {part} in {LIMIT_S} s")

    def close(self):
        self._connection.close()


def test_a_step_is_told_by_the_first_look_after_its_row(tmp_path, run):
    """What looks and pages wait for is less than a second; bench_ui.py measures all of it."""
    database = Database(tmp_path / "cache")
    runs = Runs([tmp_path / "runs"], database)
    looks = Queue()
    watcher = Watcher(runs, pause=lambda seconds: looks.get())

    async def told():
        listener = watcher.add(["r"])
        found = [await asyncio.wait_for(listener.queue.get(), LIMIT_S)]
        for step in range(4, 9):
            write_steps(run, range(step, step + 1), groups=1)
            looks.put(None)
            found.append(await asyncio.wait_for(listener.queue.get(), LIMIT_S))
        watcher.remove(listener)
        return found

    try:
        ready, *changes = asyncio.run(told())
    finally:
        looks.put(None)
        watcher.close()
        runs.close()
        database.close()
    assert ready == ("ready", {})
    assert [data["step"] for _, data in changes] == [4, 5, 6, 7, 8]
    assert all({"metrics", "rollouts"} <= set(data["parts"]) for _, data in changes)
    pause_ms = re.search(r"PAUSE_MS = (\d+);", (WEB / "src" / "lib" / "live.ts").read_text())
    assert LOOK_S + int(pause_ms[1]) / 1000 < 1.0


@pytest.mark.slow
def test_what_is_told_is_on_the_pages(tmp_path, run):
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        events = Events(ui, "/live?run=r")
        for step in range(4, 7):
            write_steps(run, range(step, step + 1), groups=1)
            data = events.next("metrics")
            while data["step"] != step:
                data = events.next("metrics")
            assert data["run"] == "r"
            assert ui.get("/runs/r")["identity"]["step"] == step
            assert ui.get("/runs/r/rollouts")["steps"]["last"] == step
        events.close()


@pytest.mark.slow
def test_every_part_of_a_run_is_told(tmp_path, run):
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        events = Events(ui)
        for part, write in {
            "rollouts": lambda: write_steps(run, range(9, 10), groups=1),
            "logs": lambda: (run.logs_path / "a.log").write_text("x\n"),
            "events": lambda: _append(run.path / "events" / "step-000001.jsonl"),
            "calls": lambda: _append(run.path / "calls" / "000001.jsonl"),
            "summary": lambda: run.write_summary({"a": 1}),
            "state": lambda: run.fail("no more"),
        }.items():
            _until_told(events, part, write)
        shutil.copytree(run.path, tmp_path / "runs" / "another")
        assert events.next("runs") == {"runs": ["another", "r"], "changed": ["another"]}
        shutil.rmtree(tmp_path / "runs" / "another")
        assert events.next("runs") == {"runs": ["r"], "changed": ["another"]}
        events.close()


def _append(path):
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write("{}\n")


def _until_told(events, part, write):
    write()
    assert events.next(part)["run"] == "r"


@pytest.mark.slow
def test_no_more_pages_can_listen_than_there_is_room_for(tmp_path, run, monkeypatch):
    monkeypatch.setattr("telescope_ui.web.live.MAX_LISTENERS", 3)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        pages = [Events(ui) for _ in range(3)]
        answer = ui.ask("/live", authorization=f"Bearer {TOKEN}")
        assert answer.status == 503
        for page in pages:
            page.close()


@pytest.mark.slow
def test_a_run_that_goes_back_is_followed(tmp_path, run):
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/runs/r/rollouts")["total"] == 12
        before = ui.get("/runs/r/rollouts/3.0/0/1")["row"]
        restart = Restart(time_s=1.0, reason="a rank died", reached=3, step=1, checkpoint="")
        run.go_back(restart)
        assert ui.get("/runs/r/rollouts")["total"] == 4
        assert ui.get("/runs/r")["identity"]["step"] == 1
        assert "no rollout 0" in ui.get("/runs/r/rollouts/3.0/0/1", status=404)["error"]["message"]
        write_steps(run, range(2, 4), groups=1, seed=1)
        page = ui.get("/runs/r/rollouts?sort=step&step_from=3")
        assert page["total"] == 4
        after = ui.get("/runs/r/rollouts/3.0/0/1")["row"]
        assert after["metrics"] != before["metrics"]
        assert page["columns"]["metrics/length"][0] == pytest.approx(after["metrics"]["length"])
        assert ui.get("/runs/r")["curves"]["steps"] == [1, 2, 3]
        assert ui.get("/runs/r")["restarts"][0]["reason"] == "a rank died"


def test_a_torn_last_line_waits_for_its_end(tmp_path, run):
    path = run.path / "metrics.jsonl"
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        with path.open("a") as stream:
            stream.write('{"step": 4, "entropy": 0.2')
            stream.flush()
            assert ui.get("/runs/r")["identity"]["step"] == 3
            stream.write("5}\n")
        page = ui.get("/runs/r?metric=entropy")
        assert page["identity"]["step"] == 4
        assert page["curves"]["metrics"]["entropy"][-1] == 0.25


@pytest.mark.slow
def test_a_run_that_is_deleted_while_it_is_shown_is_gone(tmp_path, run):
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/runs/r/rollouts")["total"] == 12
        shutil.rmtree(run.rollouts_path)
        assert ui.get("/runs/r/rollouts")["total"] == 0
        shutil.rmtree(run.path)
        told = ui.get("/runs/r", status=404)["error"]["message"]
        assert "this run is gone" in told
        assert "runs/r" in told
        assert "gone" not in ui.get("/runs/never", status=404)["error"]["message"]
        assert ui.get("/")["runs"] == []
        again = RunFolder.create(run.path, config={})
        write_steps(again, range(1, 2), groups=1)
        assert ui.get("/runs/r/rollouts")["total"] == 4


def test_a_killed_run_is_not_running(tmp_path, run):
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/")["runs"][0]["state"] == "running"
        kill(run)
        assert ui.get("/")["runs"][0]["state"] == "interrupted"


@pytest.mark.slow
def test_two_servers_show_the_same_run(tmp_path, run):
    """The second is another process, as index files are locked between processes."""
    code = (
        "import json, sys; from pathlib import Path; "
        "from telescope_ui.files.database import Database; "
        "from telescope_ui.index.run_index import RunIndex; "
        "index = RunIndex(Path(sys.argv[1]), Database(Path(sys.argv[2]))); "
        "print(json.dumps(index.refresh(60)), flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(run.path.resolve()), str(tmp_path / "cache")]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert json.loads(other.stdout.readline())["files_done"] == 3
        with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
            assert ui.get("/runs/r/rollouts")["total"] == 12
        other.communicate("\n", timeout=LIMIT_S)
    files = sorted(path.name[-8:] for path in (tmp_path / "cache").glob("*.duckdb"))
    assert files == ["0.duckdb", "1.duckdb"]


@pytest.mark.slow
def test_the_index_can_be_deleted_or_damaged(tmp_path, run):
    def indexed():
        database = Database(tmp_path / "cache")
        index = RunIndex(run.path.resolve(), database)
        state = index.refresh(LIMIT_S)
        total = index.rows("SELECT count(*) FROM {rollouts}")[0][0]
        database.close()
        assert state["is_complete"]
        return total

    assert indexed() == 12
    (file,) = (tmp_path / "cache").glob("*.duckdb")
    file.unlink()
    assert indexed() == 12
    file.write_bytes(b"no database at all " * 1000)
    assert indexed() == 12
    file.write_bytes(file.read_bytes()[:5000])
    assert indexed() == 12


def test_an_index_that_nobody_has_used_for_long_is_removed(tmp_path):
    (tmp_path / "cache").mkdir()
    old, new = (tmp_path / "cache" / f"v1-{name}-0.duckdb" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    Database(tmp_path / "cache").close()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/file/cache: .*XDG_CACHE_HOME"):
        Database(tmp_path / "file" / "cache")
    assert (tmp_path / "file").read_text() == ""


def test_only_what_is_new_is_read(tmp_path, run):
    database = Database(tmp_path / "cache")
    index = RunIndex(run.path.resolve(), database)
    index.refresh(LIMIT_S)
    before = index.generation
    index.refresh(LIMIT_S)
    assert index.generation == before
    write_steps(run, range(4, 5), groups=1)
    index.refresh(LIMIT_S)
    assert index.generation == before + 1
    assert index.rows("SELECT count(*) FROM {groups}")[0][0] == 4
    database.close()


def test_the_logs_of_an_eval_without_a_run_are_told(tmp_path):
    write_standalone(tmp_path / "runs" / "e", solved=2)
    database = Database(tmp_path / "cache")
    runs = Runs([tmp_path / "runs"], database)
    try:
        (one,) = runs.evals()
        before = state_of(one)
        (one.path / "logs").mkdir()
        (one.path / "logs" / "worker.log").write_text("hm\n")
        after = state_of(one)
    finally:
        runs.close()
        database.close()
    assert {part for part in after if after[part] != before.get(part)} == {"logs"}
