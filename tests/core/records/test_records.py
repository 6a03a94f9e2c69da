"""Run folders: what is written comes back, also from a run that was killed."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from telescope_core.base import interrupts
from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError, TelescopeError
from telescope_core.records import RolloutRow, RunFolder, RunState, row_of
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.events import AttemptEvent, EventLog, Stage
from telescope_core.records.files import append_json_line, read_json_lines
from telescope_core.records.folders import whole_file, whole_folder
from telescope_core.records.identity import Resume
from telescope_core.records.restarts import Restart
from telescope_core.records.rows import row_from_json, row_to_json
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_core.types import (
    Completion,
    Message,
    Rollout,
    RolloutStatus,
    StopReason,
    ToolCall,
    Turn,
    TurnInfo,
)


def a_rollout(status=RolloutStatus.KEPT, **changes):
    asked = Message(role="user", content="2+2=")
    said = Message(
        role="assistant",
        content="4",
        reasoning="two and two",
        tool_calls=(ToolCall(id="c", name="add", arguments="{}"),),
    )
    turn = Turn(
        completion=Completion(
            message=said,
            finish_reason="length",
            tokens=sampled_tokens((1, 2), (3, 4, 5), (-0.5, -0.25, 0.0)),
            oldest_version=2,
            newest_version=3,
            num_prompt_tokens=2,
            num_completion_tokens=3,
        ),
        started_s=1.0,
        ended_s=1.5,
    )
    fields = {
        "environment": "math",
        "example_id": "e1",
        "group_id": "g1",
        "index": 0,
        "messages": (asked, said),
        "turns": (turn,),
        "golden_answers": {"answer": "4"},
        "tools": ({"type": "function", "function": {"name": "add"}},),
        "info": (TurnInfo(turn=0, key="output", value="4", kind="stdout"),),
        "status": status,
        "reward": 1.0,
        "rewards": {"correct": 1.0},
        "metrics": {"length": 3.0},
        "tags": {"level": "digit"},
    }
    return Rollout(**{**fields, **changes})


def a_failed_rollout():
    return a_rollout(
        RolloutStatus.FAILED,
        index=1,
        messages=(),
        turns=(),
        reward=None,
        rewards={},
        error="EndpointError: gone",
        status_reason="EndpointError",
        stop_reason=StopReason.ERROR,
    )


def test_row_keeps_the_rollout_and_survives_json():
    row = row_of(a_rollout(), step=4, advantage=-0.5, with_tokens=True)
    assert (row.num_turns, row.num_completion_tokens, row.is_truncated) == (1, 3, True)
    assert (row.oldest_version, row.newest_version, row.generate_s) == (2, 3, 0.5)
    assert row.completion_text == "4"
    assert row.completion_ids == (array("i", [3, 4, 5]),)
    assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row


def test_rollout_files_hold_every_status_in_one_schema(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    rows = [
        row_of(a_rollout(), step=10, advantage=0.5, with_tokens=True),
        row_of(a_failed_rollout(), step=10),
        row_of(a_rollout(RolloutStatus.DISCARDED, index=2), step=10),
        row_of(a_rollout(RolloutStatus.CANCELLED, index=3, reward=None), step=10),
    ]
    path = run.write_rollouts(10, rows)
    run.write_rollouts(2, [])
    assert path.name == "step-000010.parquet"
    assert run.rollout_steps() == [2, 10]
    assert run.rollouts() == rows == run.rollouts([10])
    columns = pyarrow.parquet.read_table(path, columns=["status", "reward"]).to_pydict()
    assert columns["status"] == ["kept", "failed", "discarded", "cancelled"]
    assert [reward is None for reward in columns["reward"]] == [False, True, False, True]
    assert run.rollouts([2]) == []


def test_writing_tokens_makes_no_object_per_token(tmp_path):
    num_tokens = 200_000
    (turn,) = a_rollout().turns
    tokens = sampled_tokens((), array("i", range(num_tokens)), array("f", bytes(4 * num_tokens)))
    completion = replace(turn.completion, tokens=tokens)
    row = row_of(a_rollout(turns=(replace(turn, completion=completion),)), with_tokens=True)
    run = RunFolder.create(tmp_path / "run", config={})
    run.write_rollouts(1, [row])
    tracemalloc.start()
    run.write_rollouts(1, [row])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 2 * 4 * num_tokens


def test_a_rollout_file_cut_short_is_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    path = run.write_rollouts(1, [row_of(a_rollout())])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"step-000001\.parquet"):
        run.rollouts()


def test_metrics_are_read_while_written_and_torn_lines_left_out(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    run.log_metrics({"step": 1, "loss/total": float("nan"), "reward/mean": np.float32(0.5)})
    assert run.metrics() == [{"step": 1, "loss/total": None, "reward/mean": 0.5}]
    path = run.path / "metrics.jsonl"
    with path.open("a") as stream:
        stream.write('{"step": 2, "rew')
    assert [row["step"] for row in run.metrics()] == [1]
    run.log_metrics({"step": 3})
    assert [row["step"] for row in run.metrics()] == [1, 3]
    for step, loss in ((2, 1.0), (3, 2.0), (2, 3.0)):
        run.log_metrics({"step": step, "loss/total": loss})
    assert [(row["step"], row["loss/total"]) for row in run.metrics()] == [
        (1, None),
        (2, 3),
        (3, 2),
    ]


def test_json_lines_hold_any_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_json_line(path, {"text": "two\nlines \u2028 and \U0001f600", "n": np.int64(3)})
    assert list(read_json_lines(path)) == [{"text": "two\nlines \u2028 and \U0001f600", "n": 3}]
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


def test_identity_state_and_summary(tmp_path):
    run = RunFolder.create(tmp_path / "a" / "run", config={"run": {"seed": 1}}, name="first")
    info = RunFolder.open(str(run.path)).info()
    assert (info.name, info.pid, info.observed_state) == ("first", os.getpid(), RunState.RUNNING)
    assert "telescope-core" in info.versions
    assert run.config() == {"run": {"seed": 1}}
    assert run.summary() is None
    run.write_summary({"delta": 0.2})
    run.finish()
    assert run.summary() == {"delta": 0.2}
    assert run.info().observed_state is RunState.FINISHED
    run.fail("ProcessDiedError: inference server 0")
    assert (run.info().state, run.info().reason) == (
        RunState.FAILED,
        "ProcessDiedError: inference server 0",
    )
    assert not list(run.path.rglob("*.tmp"))


def test_a_run_needs_a_path_in_utf8_before_it_begins(tmp_path):
    folder = tmp_path / os.fsdecode(b"run\xff")
    with pytest.raises(ConfigError, match=r"run\\udcff: expected the folder of a run .*rename"):
        RunFolder.create(folder, config={})
    assert not folder.exists()


def test_create_refuses_what_is_there(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="neither an empty folder nor the folder of a run"):
        RunFolder.create(tmp_path, config={}, replace=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    run = RunFolder.create(tmp_path / "run", config={})
    with pytest.raises(ConfigError, match="a run that is still running"):
        RunFolder.create(run.path, config={}, replace=True)
    run.finish()
    with pytest.raises(ConfigError, match=r"holds an earlier run \(finished"):
        RunFolder.create(run.path, config={})
    run.log_metrics({"step": 1})
    assert RunFolder.create(run.path, config={}, replace=True).metrics() == []


STARTS = {
    "create": lambda path: RunFolder.create(path, config={}),
    "begin": lambda path: RunFolder.begin(path, name="run"),
    "resume": lambda path: RunFolder.resume(
        path, config={}, resume=Resume(at="", step=1, checkpoint="")
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_of_many_that_start_at_once_one_goes_on(tmp_path, start):
    path = tmp_path / "run"
    if start != "create":
        RunFolder.create(path, config={}).fail("stopped")
    outcomes = []
    ready = threading.Barrier(8)

    def begin():
        ready.wait(10)
        try:
            outcomes.append(STARTS[start](path))
        except ConfigError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(type(one).__name__ for one in outcomes) == ["ConfigError"] * 7 + ["RunFolder"]
    assert len(RunFolder.open(path).info().resumes) == (start == "resume")


@pytest.mark.parametrize("start", ["begin", "resume"])
def test_a_run_that_goes_on_is_refused_also_where_folders_have_no_locks(
    tmp_path, monkeypatch, start
):
    def no_locks(descriptor, operation):
        raise OSError(errno.EBADF, "as NFS answers")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run = RunFolder.create(tmp_path / "run", config={})
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        STARTS[start](run.path)
    run.fail("stopped")
    assert STARTS[start](run.path).info().state is RunState.RUNNING


def test_open_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        RunFolder.open(tmp_path / "nope")
    with pytest.raises(ConfigError, match=r"run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match=r"run\.json: started_at"):
        RunFolder.open(tmp_path)


VICTIM = """
import os, signal, sys
from pathlib import Path
from telescope_core.records import RunFolder, RolloutRow
from telescope_core.types import RolloutStatus
run = RunFolder.create(Path(sys.argv[1]), config={"a": 1})
row = RolloutRow(step=1, environment="e", example_id="x", group_id="g", index=0,
                 status=RolloutStatus.KEPT, reward=1.0)
run.write_rollouts(1, [row])
run.log_metrics({"step": 1, "reward/mean": 1.0})
with (run.path / "metrics.jsonl").open("a") as stream:
    stream.write('{"step": 2')
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_opens_and_is_called_interrupted(tmp_path):
    path = tmp_path / "run"
    process = subprocess.run([sys.executable, "-c", VICTIM, str(path)], timeout=600, check=False)
    assert process.returncode == -signal.SIGKILL
    run = RunFolder.open(path)
    assert run.info().state is RunState.RUNNING
    assert run.info().observed_state is RunState.INTERRUPTED
    assert run.metrics() == [{"step": 1, "reward/mean": 1.0}]
    assert [row.reward for row in run.rollouts()] == [1.0]
    first, torn = (path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 1
    assert torn == '{"step": 2'


def test_damaged_lines_of_events_are_left_out_by_readers_and_when_steps_are_taken_again(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    kept = EvalPoint(time_s=1.0, name="e", tag="step-1", version=1, state=EvalPointState.DONE)
    back = Restart(time_s=1.0, reason="", reached=1, step=1, checkpoint="")
    names = ("eval_points.jsonl", "restarts.jsonl", "servers.jsonl")
    for name in names:
        for line in ({}, {"time_s": "late"}, {"version": None}, {"version": 1}):
            append_json_line(run.path / name, line)
    run.log_eval_point(kept)
    assert run.num_damaged_lines() == dict.fromkeys(names, 4)
    run.go_back(back)
    assert (run.eval_points(), run.restarts(), run.server_events()) == ([kept], [back], [])


def test_a_folder_that_was_removed_is_not_made_anew_by_going_back(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    shutil.rmtree(run.path)
    with pytest.raises(TelescopeError, match="is gone: it was removed"):
        run.go_back(Restart(time_s=1.0, reason="", reached=1, step=1, checkpoint=""))
    assert not run.path.exists()


def event_of(step=1):
    return AttemptEvent(
        time_s=1.0, step=step, environment="e", group_id="g", index=0, attempt=1, stage=Stage.DRAWN
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.log_metrics({"step": 2}),
        lambda run: run.log_server(
            ServerEvent(
                time_s=1.0,
                server="s",
                role=next(iter(ServerRole)),
                life=1,
                state=ServerState.LOST,
                version=0,
            )
        ),
        lambda run: run.log_eval_point(
            EvalPoint(time_s=1.0, name="e", tag="step-1", version=1, state=EvalPointState.DONE)
        ),
        lambda run: run.write_rollouts(2, [row_of(a_rollout(), step=2)]),
        lambda run: run.write_attempts(2, [row_of(a_rollout(), step=2)]),
        lambda run: run.write_token_facts(2, []),
        lambda run: run.write_self_tests([]),
        lambda run: run.write_summary({}),
        lambda run: run.write_examples(held_out=[], trained_before=[]),
        lambda run: run.note_settings([], [], {}),
    ],
)
@pytest.mark.parametrize("has_remains", [False, True])
def test_a_folder_that_was_moved_is_not_made_anew_by_what_a_run_writes(
    tmp_path, write, has_remains
):
    run = RunFolder.create(tmp_path / "run", config={})
    run.path.rename(tmp_path / "moved")
    if has_remains:
        # As what processes on other machines log.
        (run.path / "logs").mkdir(parents=True)
    with pytest.raises(TelescopeError, match="is gone: it was removed or moved") as told:
        write(run)
    assert ("move away what was written" in str(told.value)) == has_remains
    assert "--resume" in str(told.value)
    assert [path.name for path in tmp_path.rglob("run/**/*")] == ["logs"] * has_remains
    assert run.path.exists() == has_remains


def test_a_folder_that_was_moved_is_not_made_anew_by_its_events(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    with EventLog(run.events_path) as log:
        log.extend([event_of()])
        log.flush()
        run.path.rename(tmp_path / "moved")
        log.extend([event_of()])
        with pytest.raises(FileNotFoundError):
            log.flush()
    assert not run.path.exists()


def test_the_reward_of_an_eval_point_is_told_by_its_digits():
    point = EvalPoint(
        time_s=1.0,
        name="e",
        tag="step-1",
        version=1,
        state=EvalPointState.DONE,
        reward=0.000412,
        pass_at={1: 0.25},
    )
    assert point.text == "eval step-1, e: reward 0.000412, pass@1 0.250"
    assert "reward 2.5e+06," in replace(point, reward=2.5e6).text


def test_row_defaults_record_a_rollout_that_never_began():
    row = RolloutRow(
        step=0, environment="e", example_id="", group_id="g", index=0, status=RolloutStatus.FAILED
    )
    assert (row.completion_text, row.reward) == ("", None)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "model"
    with whole_folder(place) as partial:
        (partial / "first").touch()
        assert not place.exists()

    def fail():
        with whole_folder(place) as partial:
            (partial / "second").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "first"]
    with whole_folder(place) as partial:
        (partial / "third").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "third"]


@pytest.mark.parametrize("masked", [0o022, 0o027, 0o077])
def test_files_of_a_whole_folder_have_the_mode_of_new_ones(tmp_path, masked):
    before = os.umask(masked)
    try:
        with whole_folder(tmp_path / "model") as partial:
            (partial / "adapter").mkdir()
            for name in ("model", "adapter/model"):
                (partial / name).touch(mode=0o600)
            (partial / "program").touch(mode=0o777)
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path / "model").as_posix(): path.stat().st_mode & 0o777
        for path in (tmp_path / "model").rglob("*")
        if path.is_file()
    }
    new = 0o666 & ~masked
    assert modes == {"model": new, "adapter/model": new, "program": 0o777 & ~masked}


def test_a_signal_between_two_renames_loses_neither_folder(tmp_path, monkeypatch):
    place = tmp_path / "model"
    place.mkdir()
    rename = Path.rename

    def ended_after(path, target):
        found = rename(path, target)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(Path, "rename", ended_after)
    with interrupts.taken(), whole_folder(place) as partial:
        (partial / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "new"]


@pytest.mark.parametrize("writer", [whole_folder, whole_file])
def test_a_second_signal_leaves_nothing_beside_an_old_version(tmp_path, monkeypatch, writer):
    """It comes while what the first one cut short is deleted."""
    removing = {whole_folder: (shutil, "rmtree"), whole_file: (Path, "unlink")}[writer]
    remove = getattr(*removing)

    def signalled(*arguments, **more):
        if interrupts.asked():
            os.kill(os.getpid(), signal.SIGINT)
        remove(*arguments, **more)

    def write():
        with interrupts.taken(), writer(tmp_path / "new") as new:
            new.mkdir(exist_ok=True) if writer is whole_folder else new.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(*removing, signalled)
    with pytest.raises(interrupts.Interrupted):
        write()
    assert list(tmp_path.iterdir()) == []


def test_prompt_tokens_are_those_of_all_turns():
    completion = Completion(
        message=Message(role="assistant", content="4"), finish_reason="stop", num_prompt_tokens=7
    )
    turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
    assert row_of(a_rollout(turns=(turn, turn))).num_prompt_tokens == 14
