"""What the trainer measured of tokens: one row for each turn, exactly, and found by its rollout."""

import random
from array import array

import pyarrow.parquet
import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.records import Resume, RolloutRow, RunFolder
from telescope_core.records.parquet import read_row, read_rows, write_rows
from telescope_core.records.rows import row_from_json, row_to_json
from telescope_core.records.step_files import StepPart
from telescope_core.records.token_facts import TurnFacts, facts_of_rollout, read_facts, write_facts
from telescope_core.types import RolloutStatus, Span


def facts(index=0, *, turn=0, size=3, attempt=1) -> TurnFacts:
    rng = random.Random(f"{index} {turn}")
    return TurnFacts(
        group_id=f"g{index // 4}",
        index=index % 4,
        attempt=attempt,
        turn=turn,
        weight=0.25,
        logprobs=array("f", [-rng.random() for _ in range(size)]),
        entropy=array("f", [rng.random() for _ in range(size)]),
        effective_advantages=array("f", [rng.gauss(0, 1) for _ in range(size)]),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 7, 10_000])
def test_facts_come_back_and_one_rollout_is_found(tmp_path, chunk_tokens):
    path = tmp_path / "facts.parquet"
    rows = [facts(index, turn=turn, size=index + 1) for index in range(9) for turn in range(3)]
    write_facts(path, rows, chunk_tokens=chunk_tokens)
    assert list(read_facts(StepPart(path))) == rows
    assert facts_of_rollout(StepPart(path), ("g1", 2, 1)) == rows[18:21]
    assert facts_of_rollout(StepPart(path), ("g1", 2, 2)) == []
    if chunk_tokens == 7:
        assert pyarrow.parquet.ParquetFile(path).num_row_groups > 3


def test_a_step_that_trained_on_nothing_has_a_file_without_rows(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    assert list(run.token_facts(1)) == []
    assert run.write_token_facts(1, []).is_file()
    assert list(run.token_facts(1)) == []


def test_facts_of_steps_that_are_taken_again_are_deleted(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step in (1, 2, 3):
        run.write_token_facts(step, [facts(step)])
    run.fail("it was stopped")
    run = RunFolder.resume(run.path, config={}, resume=Resume(at="now", step=1, checkpoint=""))
    run.drop_after(1)
    assert list(run.token_facts(1)) == [facts(1)]
    assert [path.name for path in (run.path / "token_facts").iterdir()] == ["step-000001.parquet"]


def test_a_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "facts.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"facts\.parquet"):
        list(read_facts(StepPart(path)))
    with pytest.raises(ConfigError, match=r"facts\.parquet"):
        facts_of_rollout(StepPart(path), ("g", 0, 1))


def test_the_weights_of_each_token_come_back_with_a_rollout(tmp_path):
    spans = ((Span(3, 2), Span(4, 1)), (), (Span(4, 5),))
    row = RolloutRow(
        step=1,
        environment="e",
        example_id="x",
        group_id="g",
        index=0,
        status=RolloutStatus.KEPT,
        version_spans=spans,
        tokens=(sampled_tokens([1], [2], [-1.0]),),
    )
    path = tmp_path / "rows.parquet"
    write_rows(path, [row])
    assert next(read_rows([path])) == read_row(path, 0) == row
    assert row_from_json(row_to_json(row)) == row
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["version_spans"]), path)
    assert next(read_rows([path])).version_spans == ()
