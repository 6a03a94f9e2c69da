"""Files of a run that are torn or too large: the others are shown, and these are named."""

import errno
import json
import math
import os
import shutil
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.ui.recorded import (
    BEGAN_S,
    STEP_S,
    write_eval,
    write_run,
    write_standalone,
    write_steps,
)
from tests.ui.served import LIMIT_S, answered, served
from tests.ui.test_live import Events

from telescope_core.diagnosis import History, diagnose
from telescope_core.records import RunFolder
from telescope_core.records.blocks import BlockLog
from telescope_core.records.timeline import ModelCall
from telescope_core.reports import overview_of
from telescope_ui.pages import happened
from telescope_ui.web import app, export
from telescope_ui.web.export import export_runs

SERVER = "http://127.0.0.1:1"
STAGES = ("drawn", "waiting", "environment", "generating", "scoring", "done")


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 4), groups=1)
    for step in range(1, 4):
        write_events(run, step)
    return run


def write_events(run, step, *, groups=(), packed=False):
    """Write the stages of one rollout of each group, a second apart, into the file of `step`."""
    events = [
        {
            **{"step": step, "environment": "math", "group_id": group, "index": 0, "attempt": 1},
            **{"time_s": BEGAN_S + STEP_S * (step - 1) + at, "stage": stage},
        }
        for group in groups or (f"{step}.0",)
        for at, stage in enumerate(STAGES)
    ]
    path = run.path / "events" / f"step-{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    if packed:
        table = pa.Table.from_pylist(
            [{"call": 0, "server": "", "version": None, "reason": "", **one} for one in events]
        )
        pq.write_table(table, path.with_suffix(".parquet"))
    else:
        path.write_text("".join(f"{json.dumps(one)}\n" for one in events))


@pytest.mark.parametrize("has_calls", [False, True])
def test_stages_are_found_under_the_step_that_a_rollout_was_drawn_for(tmp_path, run, has_calls):
    """With batch_order = "finished", a rollout may be trained on in another step."""
    write_steps(run, range(4, 8), groups=2)
    for step in range(4, 8):
        write_events(run, step, groups=("drawn.early",) if step == 4 else ())
    write_events(run, 4, groups=("4.0", "7.1"), packed=True)
    if has_calls:
        with BlockLog(run.path / "calls", ModelCall) as log:
            about = {"group_id": "7.1", "index": 0, "step": 4, "server": SERVER}
            log.add(ModelCall(time_s=BEGAN_S + 33, duration_s=1.0, **about))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/rollouts/7.1/0/1")
        assert page["row"]["step"] == 7
        assert page["events"]["columns"]["stage"] == list(STAGES)
        shown = ui.get(page["addresses"]["timeline"])
        assert "/runs/r/rollouts/7.1/0/1" in [
            address for one in shown["rows"] for address in one["bars"]["columns"]["address"]
        ]


def damage_footer(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def damage_pages(path):
    content = path.read_bytes()
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    path.write_bytes(b"PAR1" + b"\xff" * (len(content) - footer - 4) + content[-footer:])


@pytest.mark.parametrize("damage", [damage_footer, damage_pages])
def test_a_torn_file_of_events_is_named_and_the_others_are_shown(tmp_path, run, damage):
    write_events(run, 2, packed=True)
    (run.path / "events" / "step-000002.jsonl").unlink()
    damage(run.path / "events" / "step-000002.parquet")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get(f"/runs/r/timeline?from={BEGAN_S}&to={BEGAN_S + 40}")
        (row,) = (one for one in page["rows"] if one["source"] == "environment math")
        assert set(row["bars"]["columns"]["step"]) == {1, 3}
        assert [one[:26] for one in page["problems"]] == ["events/step-000002.parquet"]
        rollout = ui.get("/runs/r/rollouts/2.0/0/1")
        assert rollout["events"]["columns"]["stage"] == []
        assert [one[:26] for one in rollout["problems"]] == ["events/step-000002.parquet"]
        assert ui.get("/runs/r/rollouts/1.0/0/1")["events"]["columns"]["stage"] == list(STAGES)
        assert ui.get("/runs/r/timeline/trace.json")["otherData"]["problems"]


@pytest.mark.parametrize("damage", [damage_footer, damage_pages])
def test_what_is_said_of_damage_is_in_words_and_what_a_library_said_is_apart(tmp_path, run, damage):
    path = run.path / "rollouts" / "step-000002.parquet"
    damage(path)
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text('{"name": "to')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        (problem,) = ui.get("/runs/r/rollouts")["index"]["problems"]
        said, _, details = problem.partition("\n")
        assert said.startswith("rollouts/step-000002.parquet is left out")
        assert "rollouts in it are not shown" in said
        assert "copy the file again" in said
        assert details
        for word in ("Error", "parquet_metadata", "read_parquet", "SELECT", "LINE 1", "Thrift"):
            assert word not in said
        rows = ui.get("/")["runs"]
        torn = next(row["error"] for row in rows if row["key"] == "torn")
        assert "run.json is damaged" in torn
        assert "has no run.json" not in torn


def test_names_that_are_not_utf8_are_shown_as_escapes_or_left_out(tmp_path, run):
    odd = tmp_path / "runs" / os.fsdecode(b"odd\xff")
    write_standalone(tmp_path / "runs" / os.fsdecode(b"eval\xff"), solved=2)
    os.symlink(tmp_path, tmp_path / "runs" / os.fsdecode(b"link\xff"))
    shutil.copytree(run.path, odd)
    write_eval(run, "after", version=3, solved=6)
    shutil.copytree(run.evals_path / "math-after", run.evals_path / os.fsdecode(b"copy\xff"))
    (run.logs_path / os.fsdecode(b"copy\xff.log")).write_bytes(b"a line\n")
    (run.logs_path / "server-0.log").write_bytes(b"a line \xff\n")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/")
        rows = {row["key"]: row for row in page["runs"] + page["evals"]}
        assert rows["r"]["error"] is None
        assert rows["odd-"]["name"] == r"odd\udcff"
        assert "expected the folder of a run at a path in UTF-8" in rows["odd-"]["error"]
        assert (rows["eval-"]["name"], rows["eval-"]["error"]) == (r"eval\udcff", None)
        assert [one.rpartition("/")[2] for one in page["left_out"]] == [r"link\udcff"]
        for part in ("", "/timeline", "/rollouts", "/logs"):
            error = ui.get(f"/runs/odd-{part}", status=409)["error"]["message"]
            assert "rename the folder" in error
        assert "math-after" in json.dumps(ui.get("/runs/r/evals"))
        assert "a line \ufffd" in json.dumps(ui.get("/runs/r/logs"), ensure_ascii=False)


def test_a_rollout_in_a_file_that_was_damaged_since_is_refused_in_words(tmp_path, run):
    path = run.path / "rollouts" / "step-000002.parquet"
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        address = ui.get("/runs/r/rollouts?step_from=2&step_to=2")["columns"]["address"][0]
        stamp = path.stat()
        damage_pages(path)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        error = ui.get(address, status=409)["error"]["message"]
        assert error.startswith("rollouts/step-000002.parquet cannot be read: its content")


def test_a_rollout_of_a_newer_version_is_refused_in_words(tmp_path, run, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = run.path / "rollouts" / "step-000002.parquet"
    table = pq.read_table(path)
    info = pa.array(['[{"turn": 0, "key": "a", "value": "b", "kind": "newer"}]'] * len(table))
    pq.write_table(table.set_column(table.column_names.index("info"), "info", info), path)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        address = ui.get("/runs/r/rollouts?step_from=2&step_to=2")["columns"]["address"][0]
        error = ui.get(address, status=409)["error"]["message"]
        assert "not the row of a rollout" in error
    exported = export_runs([run.path], tmp_path / "export", num_rollouts=10)
    assert 0 < exported.num_unreadable < exported.num_pages


def test_lines_of_metrics_are_taken_as_commands_take_them(tmp_path, run):
    path = run.path / "metrics.jsonl"
    others = (
        '{}\n{"step": "abc"}\nnull\n{"ste\n\n{"step": true}\n{"step": 9, "a": NaN, "b": 1e999}\n'
    )
    path.write_text(path.read_text() + others + '{"step": 10, "a": 2.0, "b": -Infinity}\n')
    assert run.last_step() == 10
    assert run.num_damaged_lines() == {"metrics.jsonl": 5}
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r?metric=a&metric=b")
        assert any("metrics.jsonl has 5 damaged lines" in one for one in page["problems"])
        assert ui.get("/")["runs"][0]["step"] == 10


def test_steps_out_of_order_are_drawn_in_their_order(tmp_path, run):
    """As two processes in one folder, or a merge of two files, leave them."""
    for step, reward in ((7, 0.7), (6, 0.9), (6, 0.6), (5, 0.5), (4, 0.4)):
        run.log_metrics({"step": step, "groups/discarded": 9, "groups/total": 9, "reward": reward})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        curves = ui.get("/runs/r?metric=reward")["curves"]
        assert curves["steps"] == [1, 2, 3, 4, 5, 6, 7]
        assert curves["metrics"]["reward"][3:] == [0.4, 0.5, 0.6, 0.7]


def test_damaged_lines_of_servers_and_meters_are_left_out_and_counted(tmp_path, run):
    def write(name, *rows):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"time_s": BEGAN_S, **row}) + "\n" for row in rows))

    states = {"server": SERVER, "life": 2, "state": "serving"}
    damaged = ({"life": "two"}, {"time_s": None}, {"version": []}, {"server": 1}, {"state": {}})
    write("servers.jsonl", states, *({**states, **one} for one in damaged))
    meter = {"source": "driver", "name": "cpu", "value": 1.0}
    damaged = ({"source": None}, {"name": None}, {"value": "x"})
    write("gauges/000001.jsonl", meter, *({**meter, **one} for one in damaged))
    with (run.path / "gauges" / "000001.jsonl").open("a") as stream:
        stream.write('{"time_s": 1')
    restart = {"reason": "rank 0 died", "reached": 2, "step": 1, "checkpoint": ""}
    write("restarts.jsonl", restart, {**restart, "step": {}}, {**restart, "time_s": "late"})
    point = {"name": "e", "tag": "step-1", "version": 1, "state": "done"}
    write("eval_points.jsonl", point, {**point, "version": "x"}, {**point, "reward": "high"}, {})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/infra")
        assert [one["num_lives"] for one in page["servers"]] == [2]
        assert [one["latest"] for one in page["sources"]] == [{"cpu": 1.0}]
        said = " ".join(page["problems"])
        assert "servers.jsonl has 5 damaged lines" in said
        assert "gauges/000001.jsonl has 3 damaged lines" in said
        page = ui.get("/runs/r")
        assert (len(page["restarts"]), len(page["eval_points"])) == (1, 1)
        said = " ".join(page["problems"])
        assert "restarts.jsonl has 2 damaged lines" in said
        assert "eval_points.jsonl has 3 damaged lines" in said
        for place in ("", "/timeline", "/logs"):
            assert ui.get(f"/runs/r{place}")


def test_a_fault_of_a_page_is_answered_as_every_error_is(tmp_path, run, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(app, "config_page", fail)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        error = ui.get("/runs/r/config", status=500)["error"]
        assert error["status"] == 500
        assert "(RuntimeError)" in error["message"]


def test_the_lines_of_a_step_are_read_where_its_packed_file_is_torn(tmp_path, run):
    (run.path / "events" / "step-000002.parquet").write_bytes(b"PAR1 and no more")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/runs/r/rollouts/2.0/0/1")["events"]["columns"]["stage"] == list(STAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["events", *(pytest.param(n, marks=pytest.mark.slow) for n in ("calls", "timeline"))]
)
def test_a_line_that_is_too_long_for_a_block_log_is_named(tmp_path, run, folder):
    name = "step-000002.jsonl" if folder == "events" else "000001.jsonl"
    path = run.path / folder / name
    path.parent.mkdir(exist_ok=True)
    # More than the 32 MiB that are read at once.
    path.write_bytes(b"x" * (33 * 2**20) + b'\n{"time_s": 1.0}\n')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/timeline")
        problems = page["problems"] + page["index"]["problems"]
        assert any(one.startswith(f"{folder}/{name}") for one in problems)
        assert "environment math" in [one["source"] for one in page["rows"]]


def test_events_of_ten_gigabytes_are_named(tmp_path, run):
    with (run.path / "events" / "step-000002.jsonl").open("ab") as stream:
        stream.truncate(10 * 2**30)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/timeline")
        assert [one[:24] for one in page["problems"]] == ["events/step-000002.jsonl"]
        assert ui.get("/runs/r/rollouts/2.0/0/1")["problems"] == page["problems"]


LINES = {
    "servers.jsonl": {"server": "s", "state": "serving", "life": 1},
    "restarts.jsonl": {"reason": "a", "reached": 2, "step": 1},
    "eval_points.jsonl": {"name": "e", "tag": "after", "state": "done"},
    "metrics.jsonl": {"step": 4, "entropy": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["servers.jsonl", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LINES)[1:])]
)
def test_a_line_of_a_gigabyte_fills_no_memory_and_is_told(tmp_path, run, name):
    path = run.path / name
    with path.open("ab") as stream:
        stream.truncate(stream.tell() + 2**30)
        stream.seek(0, os.SEEK_END)
        stream.write(f"\n{json.dumps({'time_s': BEGAN_S, **LINES[name]})}\n".encode())
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        before = _now_bytes()
        page = ui.get("/runs/r")
        assert any(name in one for one in page["problems"])
        assert any(name in one for one in ui.get("/runs/r/timeline")["problems"]) or (
            name == "metrics.jsonl"
        )
        assert _peak_bytes() - before < 300 * 2**20


def _now_bytes():
    """Return the peak of memory from now on, which is what is in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
def test_metrics_of_many_names_and_steps_have_a_bound(tmp_path, run):
    path = run.path / "metrics.jsonl"
    many = {f"m{number}": 1.0 for number in range(4000)}
    with path.open("a") as stream:
        stream.write(json.dumps({"step": 4, **many}) + "\n")
        stream.write('{"step":5}\n' * 40_000)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        before = _now_bytes()
        page = ui.get("/runs/r")
        assert any("metrics.jsonl" in one for one in page["problems"])
        assert _peak_bytes() - before < 600 * 2**20


@pytest.mark.parametrize(
    "name", ["summary.json", "self_tests.json", "checkpoints/a/checkpoint.json"]
)
def test_a_file_that_is_too_large_is_told_and_the_page_is_there(tmp_path, run, name):
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.truncate(10 * 2**30)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r")
        assert [one.partition(" ")[0] for one in page["problems"]] == [name]
        assert page["curves"]["steps"] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["logs", "events", "runs"])
def test_a_file_system_that_fails_for_a_moment_does_not_end_the_watch(
    tmp_path, run, monkeypatch, folder
):
    bad = tmp_path / "runs" if folder == "runs" else run.path / folder
    left: list[int] = []
    has_failed = Event()
    real = os.scandir

    def scandir(path):
        if left and os.fspath(path) == str(bad.resolve()):
            if left.pop() == 0:
                has_failed.set()
            raise OSError(errno.EIO, "the disk does not answer", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        events = Events(ui, "/live?run=r")
        left += [0, 1, 2]
        assert has_failed.wait(LIMIT_S), "the watch has ended"
        write_steps(run, range(9, 10), groups=1)
        while events.next("metrics")["step"] != 9:
            pass
        events.close()


TORN = {
    "metrics.jsonl": "/runs/r",
    "servers.jsonl": "/runs/r",
    "summary.json": "/runs/r",
    "checkpoints/a/checkpoint.json": "/runs/r",
    "evals/math-after/results.json": "/runs/r",
    "evals/math-before/results.json": "/runs/r/evals/math-after",
    "evals/math-after/rollouts.jsonl": "/runs/r/evals/math-after",
}


@pytest.mark.parametrize("name", TORN)
def test_what_is_torn_in_its_middle_is_named_and_the_page_is_there(tmp_path, run, name):
    for tag, version, solved in (("before", 0, 2), ("after", 3, 8)):
        write_eval(run, tag, version=version, solved=solved)
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"step": 2, "time_s": BEGAN_S, "server": "s", "state": "serving"})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get(TORN[name])["problems"] == []
        if path.suffix == ".jsonl":
            before = path.read_text() if path.exists() else ""
            # The last line, without its end, is of a run that is being written.
            path.write_text(f"{line[:20]}\n{before}{line[:20]}")
        else:
            path.write_text(line[:20])
        page = ui.get(TORN[name])
        assert [one.partition(" ")[0] for one in page["problems"]] == [name]
        if name == "evals/math-after/results.json":
            assert "math-after cannot be read" in page["verdict"]["text"]
            assert ui.get("/runs/r/evals")["problems"] == page["problems"]


def test_evals_of_pictures_are_read_to_their_end_and_lines_that_are_too_long_are_told(tmp_path):
    write_standalone(tmp_path / "runs" / "alone", solved=5)
    path = tmp_path / "runs" / "alone" / "rollouts.jsonl"
    first, *others, last = path.read_text().splitlines()
    picture = {"media_type": "image/png", "data": "A" * 9 * 2**20, "at": 0}
    seen = json.loads(last)
    seen["messages"][0]["images"] = [picture]
    path.write_text(f"{first}\n")
    with path.open("ab") as stream:
        # A line of zeros that fills no disk.
        stream.truncate(513 * 2**20)
        stream.seek(0, os.SEEK_END)
        stream.write("\n".join(["", *others, json.dumps(seen), ""]).encode())
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/evals/alone")
        assert page["so_far"]["num_rollouts"] == 8
        assert page["problems"] == [
            "rollouts.jsonl has 1 line of more than 128 MiB, left out here; look at it with "
            "another program"
        ]
        shown = ui.get("/evals/alone/rollouts/eval-7/0")
        assert shown["messages"][0]["images"] == [picture]
        missing = ui.get("/evals/alone/rollouts/eval-8/0", 404)
        assert "1 line of more than 128 MiB" in missing["error"]["message"]


def test_the_list_says_that_the_result_of_an_eval_is_torn(tmp_path):
    write_standalone(tmp_path / "runs" / "alone", solved=5)
    path = tmp_path / "runs" / "alone" / "results.json"
    path.write_text(path.read_text()[:100])
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        (row,) = ui.get("/")["evals"]
        assert row["error"].startswith("results.json is damaged")
        assert row["num_scored"] == 8


@pytest.mark.parametrize("tag", ["before", "after"])
def test_without_the_result_of_either_eval_no_examples_are_counted(tmp_path, run, tag):
    for one, solved in (("before", 2), ("after", 2)):
        write_eval(run, one, version=1, solved=solved)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/evals/math-after")
        assert (page["against"], page["num_gained"], page["num_lost"]) == ("math-before", 0, 0)
        (run.evals_path / f"math-{tag}" / "results.json").unlink()
        page = ui.get("/runs/r/evals/math-after")
        assert (page["against"], page["num_gained"], page["num_lost"]) == (
            "math-before",
            None,
            None,
        )
        assert page["problems"] == []


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch):
    path = tmp_path / "checkpoints" / "a" / "checkpoint.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    then = happened.read_json

    def removing(read):
        read.unlink()
        return then(read)

    monkeypatch.setattr(happened, "read_json", removing)
    files = happened.SmallFiles(tmp_path.resolve())
    assert files.manifest("a") is None
    assert files.problems == []


def test_a_line_of_an_eval_that_is_no_whole_rollout_is_refused_in_words(tmp_path):
    write_standalone(tmp_path / "runs" / "e", solved=2)
    with (tmp_path / "runs" / "e" / "rollouts.jsonl").open("a") as stream:
        stream.write('{"group_id": "own", "index": 0, "reward": 1.0}\n')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        told = ui.get("/evals/e/rollouts/own/0", status=409)["error"]["message"]
        assert "cannot be shown" in told
        assert ui.get("/evals/e/rollouts/eval-1/0")["row"]["reward"] == 1.0


def test_a_file_that_goes_while_a_list_is_made_takes_no_other_run_with_it(
    tmp_path, run, monkeypatch
):
    write_steps(RunFolder.create(tmp_path / "runs" / "other", config={}), range(1, 2))
    exists = os.path.exists
    gone = str(run.path.resolve() / "servers.jsonl")
    monkeypatch.setattr(os.path, "exists", lambda path: str(path) == gone or exists(path))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert {one["key"] for one in ui.get("/")["runs"]} == {"r", "other"}


def test_a_clock_that_was_set_back_hides_no_stages(tmp_path, run):
    """The second step ended, by its clock, long after the third one."""
    run.log_metrics({"step": 2, "time_s": BEGAN_S + 100})
    path = run.path / "events" / "step-000002.jsonl"
    moved = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**one, "time_s": one["time_s"] + 15}) for one in moved]
    path.write_text("".join(f"{line}\n" for line in lines))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get(f"/runs/r/timeline?from={BEGAN_S + 25}&to={BEGAN_S + 31}")
        addresses = [one for row in page["rows"] for one in row["bars"]["columns"]["address"]]
        assert "/runs/r/rollouts/2.0/0/1" in addresses


@pytest.mark.parametrize("value", ["1.7e308", f"1{'0' * 400}"])
def test_values_near_the_largest_float_take_no_page_with_them(tmp_path, run, value):
    write_steps(RunFolder.create(tmp_path / "runs" / "other", config={}), range(1, 2))
    names = ("task_reward/mean", "reward/mean", "entropy", "grad_norm", "own")
    with (run.path / "metrics.jsonl").open("a") as stream:
        for step in range(4, 60):
            values = "".join(f', "{name}": {value}' for name in names)
            stream.write(f'{{"step": {step}, "time_s": {BEGAN_S + step}{values}}}\n')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert {one["key"] for one in ui.get("/")["runs"]} == {"r", "other"}
        page = ui.get("/runs/r?metric=own&metric=entropy")
        assert page["curves"]["steps"][-1] == 59
        assert page["curves"]["metrics"]["own"][-1] > 1e100
        assert {one["key"] for one in ui.get("/compare?run=r&run=other")["runs"]} == {"r", "other"}
    # What commands show of it.
    assert math.isinf(run.metrics()[-1]["own"]) is ("e" not in value)
    overview_of(run)
    diagnose(History.of_rows(run.metrics()))


def test_calls_that_are_damaged_take_no_rollouts_and_no_export_with_them(tmp_path):
    run = write_run(tmp_path / "runs" / "r", steps=3)
    damage_pages(next((run.path / "calls").glob("*.parquet")))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/runs/r/evals/math-after/rollouts/eval-2/0")["row"]["group_id"] == "eval-2"
    # Each is a server of its own, that has not seen the damage before.
    for address in ("rollouts", f"rollouts?server={SERVER}"):
        with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
            assert ui.get(f"/runs/r/{address}")["steps"] == {"first": 1, "last": 3}
    exported = export_runs([run.path], tmp_path / "export", num_rollouts=4)
    assert exported.num_unreadable == 0


def test_a_file_that_goes_during_an_export_takes_its_page_alone(tmp_path, run, monkeypatch):
    def gone(*given):
        raise FileNotFoundError(2, "No such file or directory", "config.json")

    monkeypatch.setattr(export, "config_page", gone)
    exported = export_runs([run.path], tmp_path / "export", num_rollouts=2)
    assert exported.num_unreadable == 1
