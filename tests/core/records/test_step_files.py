"""Files of old steps become one, while a run goes on, is killed at any moment, or goes back."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import RolloutStatus
from telescope_core.records import RolloutRow, RunFolder, step_files
from telescope_core.records.events import AttemptEvent, EventLog, Stage, drop_events
from telescope_core.records.parquet import read_row
from telescope_core.records.restarts import Restart
from telescope_core.records.step_files import StepPart, part_of, parts_in, step_path
from telescope_core.records.token_facts import TurnFacts


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch) -> None:
    monkeypatch.setattr(step_files, "STEPS_PER_FILE", 4)


def facts(step: int, *, size: int = 3) -> list[TurnFacts]:
    """Return facts of `step`; every third step has none, as one that was trained on nothing."""
    return [
        TurnFacts(
            group_id=f"{step}.0",
            index=index,
            attempt=1,
            turn=0,
            weight=0.5,
            logprobs=array("f", [-float(step)] * size),
            entropy=array("f", [0.5] * size),
            effective_advantages=array("f", [1.0] * size),
        )
        for index in range(step % 3)
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config={})


def write(run: RunFolder, steps: range) -> None:
    for step in steps:
        assert run.write_token_facts(step, facts(step)).is_file()


def go_back(run: RunFolder, step: int) -> None:
    run.go_back(Restart(time_s=0.0, reason="", reached=step, step=step, checkpoint=""))


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.token_facts_path.iterdir())


def assert_whole(run: RunFolder, steps: range) -> None:
    assert list(parts_in(run.token_facts_path)) == list(steps)
    assert [list(run.token_facts(step)) for step in steps] == [facts(step) for step in steps]
    assert list(run.token_facts(steps.stop)) == []


def test_old_steps_are_in_few_files_and_each_is_found(run: RunFolder) -> None:
    write(run, range(1, 11))
    assert_whole(run, range(1, 11))
    assert names(run) == [
        "step-000009.parquet",
        "step-000010.parquet",
        "steps-000001-000004.parquet",
        "steps-000005-000008.parquet",
    ]


def test_a_run_that_goes_back_has_the_steps_before_and_writes_on(run: RunFolder) -> None:
    write(run, range(1, 11))
    go_back(run, 6)
    assert_whole(run, range(1, 7))
    write(run, range(7, 14))
    assert_whole(run, range(1, 14))
    assert "steps-000005-000008.parquet" in names(run)
    go_back(run, 0)
    assert names(run) == []


def test_large_files_and_damaged_ones_stay_as_they_are(run: RunFolder, monkeypatch) -> None:
    write(run, range(1, 4))
    broken = run.token_facts_path / "step-000002.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    write(run, range(4, 10))
    assert names(run)[:4] == [f"step-{step:06d}.parquet" for step in (1, 2, 3, 4)]
    assert "steps-000005-000008.parquet" in names(run)
    monkeypatch.setattr(step_files, "LARGE_BYTES", 1)
    write(run, range(10, 15))
    assert_whole_without = [step for step in range(1, 15) if step != 2]
    assert [list(run.token_facts(step)) for step in assert_whole_without] == [
        facts(step) for step in assert_whole_without
    ]
    assert len(names(run)) == 11


def test_a_run_goes_back_behind_a_damaged_file_but_not_into_one(run: RunFolder) -> None:
    write(run, range(1, 11))
    (run.token_facts_path / "steps-000001-000004.parquet").write_bytes(b"PAR1 and no more")
    go_back(run, 6)
    assert list(run.token_facts(6)) == facts(6)
    with pytest.raises(ConfigError, match="steps-000001-000004"):
        go_back(run, 2)


def killed_at_each_change(monkeypatch, act) -> Iterator[None]:
    """Call `act` again and again, and end it before its first, second ... change on the disk."""
    at = 0
    while True:
        left = at

        def before(change):
            def changed(*arguments, **named):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                return change(*arguments, **named)

            return changed

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", before(os.replace))
            patched.setattr(Path, "unlink", before(Path.unlink))
            try:
                act()
            except KeyboardInterrupt:
                pass
            else:
                return
        yield
        at += 1


def test_blocks_that_cannot_be_merged_do_not_keep_older_ones_apart(tmp_path: Path, caplog) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    for step in range(1, 25):
        # Of the blocks from 9 and from 13, one step has the columns of another version.
        columns = {"other": ["x"]} if step in (10, 14) else {"value": [step]}
        parquet.write_table(arrow.table(columns), step_path(tmp_path, step))
    for _ in range(3):
        step_files.merge(tmp_path, up_to=24, options={})
    assert sorted(path.name for path in tmp_path.glob("steps-*")) == [
        f"steps-{first:06d}-{first + 3:06d}.parquet" for first in (1, 5, 17, 21)
    ]
    assert list(parts_in(tmp_path)) == list(range(1, 25))
    assert "earlier version" in caplog.text
    assert "schema" not in caplog.text, "Arrow's words list every column"


def test_a_kill_while_files_are_merged_loses_and_doubles_nothing(run, monkeypatch) -> None:
    write(run, range(1, 5))
    num_kills = 0
    for _ in killed_at_each_change(monkeypatch, lambda: run.write_token_facts(5, facts(5))):
        num_kills += 1
        there = list(parts_in(run.token_facts_path))
        assert there in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
        assert_whole(run, range(1, 1 + len(there)))
    assert num_kills > 6
    assert_whole(run, range(1, 6))
    assert names(run) == ["step-000005.parquet", "steps-000001-000004.parquet"]


def test_a_kill_while_a_run_goes_back_loses_no_step_that_stays(run, monkeypatch) -> None:
    write(run, range(1, 10))
    num_kills = 0
    for _ in killed_at_each_change(monkeypatch, lambda: go_back(run, 6)):
        num_kills += 1
        assert [list(run.token_facts(step)) for step in range(1, 7)] == [
            facts(step) for step in range(1, 7)
        ]
    assert num_kills > 2
    assert_whole(run, range(1, 7))


def rollouts(step: int) -> list[RolloutRow]:
    return [
        RolloutRow(
            step=step,
            environment="e",
            example_id=f"{step}-{index}",
            group_id=f"{step}.0",
            index=index,
            status=RolloutStatus.KEPT,
            reward=float(step),
        )
        for index in range(step % 3)
    ]


def write_rollouts(run: RunFolder, steps: range) -> None:
    """Write the rollouts of `steps`, and attempts of some of them."""
    for step in steps:
        if step % 3 == 2:
            run.write_attempts(step, rollouts(step)[:1])
        run.write_rollouts(step, rollouts(step))


def assert_rollouts(run: RunFolder, steps: range) -> None:
    every = [row for step in steps for row in rollouts(step)]
    assert run.rollout_steps() == list(steps)
    assert run.rollouts() == every
    assert [run.rollouts([step]) for step in steps] == [rollouts(step) for step in steps]
    assert run.count_rollouts() == {("e", RolloutStatus.KEPT): len(every)}
    assert run.attempts() == [rollouts(step)[0] for step in steps if step % 3 == 2]


def test_rollouts_and_attempts_of_old_steps_are_in_few_files(run: RunFolder) -> None:
    write_rollouts(run, range(1, 11))
    assert_rollouts(run, range(1, 11))
    for folder in (run.rollouts_path, run.attempts_path):
        merged = sorted(path.name for path in folder.glob("steps-*"))
        assert merged == ["steps-000001-000004.parquet", "steps-000005-000008.parquet"]
    assert len(list(run.rollouts_path.iterdir())) == 4
    assert list(run.attempts_path.glob("step-*")) == []
    assert run.trained_examples(5) == {
        ("e", one.example_id) for step in range(1, 6) for one in rollouts(step)
    }
    assert list(run.rewards(8)) == [("e", "8-0", 8.0), ("e", "8-1", 8.0)]
    part = part_of(run.rollouts_path, 8)
    assert part is not None
    assert read_row(part, 1) == rollouts(8)[1]
    with pytest.raises(ConfigError, match="has 2 rows"):
        read_row(part, 2)
    with pytest.raises(ConfigError, match="step-000011"):
        run.rollouts([11])


@pytest.mark.slow
def test_a_run_that_goes_back_forgets_rollouts_of_old_steps(run: RunFolder) -> None:
    write_rollouts(run, range(1, 11))
    go_back(run, 6)
    assert_rollouts(run, range(1, 7))
    write_rollouts(run, range(7, 14))
    assert_rollouts(run, range(1, 14))


def test_a_reader_finds_rollouts_that_were_merged_meanwhile(run: RunFolder) -> None:
    write_rollouts(run, range(1, 6))
    single = StepPart(step_path(run.rollouts_path, 4))
    assert not single.path.is_file()
    assert read_row(single, 0) == rollouts(4)[0]


def test_rollouts_of_a_damaged_file_are_named(run: RunFolder) -> None:
    write_rollouts(run, range(1, 6))
    path = run.rollouts_path / "steps-000001-000004.parquet"
    with path.open("r+b") as damaged:
        damaged.seek(4)
        damaged.write(bytes(200))
    with pytest.raises(ConfigError, match=f"{path} is not a readable rollout file"):
        run.rollouts()
    assert run.rollouts([5]) == rollouts(5)


def test_a_rollout_of_a_newer_version_is_refused_with_the_name_of_its_file(run: RunFolder) -> None:
    path = run.write_rollouts(1, rollouts(1))
    table = pq.read_table(path)
    newer = table.set_column(table.column_names.index("status"), "status", pa.array(["newer"]))
    pq.write_table(newer, path)
    with pytest.raises(ConfigError, match=f"{path} is not a readable rollout file: .*'newer'"):
        run.rollouts()
    with pytest.raises(ConfigError, match="'newer'; read the run with the version that wrote it"):
        run.count_rollouts()


def event(step: int, group: int) -> AttemptEvent:
    return AttemptEvent(
        time_s=float(step),
        step=step,
        environment="e",
        group_id=f"{step}.{group}",
        index=0,
        attempt=1,
        stage=Stage.DRAWN,
    )


async def test_events_of_old_steps_are_one_file_and_a_resumed_run_drops_some_of_a_step(
    run: RunFolder,
) -> None:
    with EventLog(run.events_path) as log:
        for step in range(1, 11):
            for group in (0, 1):
                log.add(event(step, group))
            if step < 10:
                log.pack(step)
    every = [f"{step}.{group}" for step in range(1, 11) for group in (0, 1)]
    assert [one.group_id for one in run.events()] == every
    assert [one.group_id for one in run.events(6)] == ["6.0", "6.1"]
    merged = ["steps-000001-000004.parquet", "steps-000005-000008.parquet"]
    files = sorted(path.name for path in run.events_path.iterdir())
    assert files == ["step-000009.parquet", "step-000010.jsonl", *merged]
    drop_events(run.events_path, after=6, is_repeated=lambda one: one.group_id.endswith(".1"))
    kept = [f"{step}.{group}" for step in range(1, 11) for group in (0, 1) if step < 7 or not group]
    assert [one.group_id for one in run.events()] == kept
