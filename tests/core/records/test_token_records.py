"""The tokens of rollouts in files: once each, exactly, in parts of bounded size, and old files."""

import json
import tracemalloc
from array import array
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.base.chains import ChainRecorder, SampledTokens, chains_of, sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.parquet import read_rows, write_rows
from telescope_core.records.rows import row_from_json, row_to_json
from telescope_core.types import Message, RolloutStatus, ToolCall, TurnInfo

VOCAB = 150_000


def row_with(tokens, index=0, **fields) -> RolloutRow:
    return RolloutRow(
        step=1,
        environment="e",
        example_id="x",
        group_id="g",
        index=index,
        status=RolloutStatus.KEPT,
        tokens=tokens,
        **fields,
    )


def straight(num_turns=40, num_tokens=32_768, seed=0) -> tuple[SampledTokens, ...]:
    """Return a rollout of random tokens, of which half are sampled."""
    drawn, recorder, known = np.random.default_rng(seed), ChainRecorder(), array("i")
    size = num_tokens // num_turns // 2
    places: list[SampledTokens] = []
    for _ in range(num_turns):
        asked, said = (
            array("i", drawn.integers(VOCAB, size=size, dtype="i4").tobytes()) for _ in range(2)
        )
        known += asked
        places.append(recorder.record(known, said, array("f", drawn.random(size, "f4").tobytes())))
        known = known + said
    return tuple(places)


@st.composite
def some_tokens(draw):
    """The tokens of a rollout in which turns go on, branch off or have none."""
    few = st.lists(st.integers(0, 2), max_size=3)
    recorder, known = ChainRecorder(), [[1]]
    places: list[SampledTokens | None] = []
    for number in range(draw(st.integers(0, 5))):
        if draw(st.integers(0, 4)) == 0:
            places.append(None)
            continue
        context = draw(st.sampled_from(known))
        prompt = [*context[: draw(st.integers(1, len(context)))], *draw(few)]
        said = [*draw(few), 5]
        known.append([*prompt, *said])
        places.append(recorder.record(prompt, said, [-number - at / 8 for at in range(len(said))]))
    return tuple(places)


def sharing(tokens):
    """Return who begins with how much of whom."""
    chains = chains_of(tokens)
    return [(chains.index(c.parent) if c.parent else None, c.num_shared) for c in chains]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.none() | some_tokens(), max_size=6), st.sampled_from([1, 2000, 1 << 20]))
def test_tokens_come_back_from_parquet_and_json(tmp_path_factory, every, chunk_bytes):
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    rows = [row_with(tokens, index) for index, tokens in enumerate(every)]
    write_rows(path, rows, chunk_bytes=chunk_bytes)
    found = list(read_rows([path]))
    assert found == rows
    assert [row_from_json(json.loads(json.dumps(row_to_json(row)))) for row in rows] == rows
    for one, tokens in zip(found, every, strict=True):
        if tokens is not None:
            assert sharing(one.tokens) == sharing(tokens)
    assert [row.tokens for row in read_rows([path], with_tokens=False)] == [None] * len(rows)


def test_a_long_rollout_takes_the_size_of_its_tokens_once(tmp_path):
    """Measure: bytes of the file for a rollout of 40 turns, against 4 + 4 bytes for each token.

    The ids are drawn evenly from a vocabulary and the log-probs from real numbers, so what zstd
    gains is that an id of 32 bits holds 17.
    """
    tokens = straight()
    path = RunFolder.create(tmp_path / "run", config={}).write_rollouts(1, [row_with(tokens)])
    assert path.stat().st_size <= 1.2 * 8 * tokens[-1].completion_end


def test_rows_are_written_in_parts_of_bounded_size(tmp_path):
    """More tokens than one part holds make more parts, so there is no limit to those of a step."""
    size = 64 * 1024
    tokens = straight(num_turns=4, num_tokens=8192)
    rows = (row_with(tokens, index) for index in range(40))
    path = tmp_path / "rows.parquet"
    write_rows(path, rows, chunk_bytes=size)
    file = pyarrow.parquet.ParquetFile(path).metadata
    parts = [file.row_group(number) for number in range(file.num_row_groups)]
    assert len(parts) == 40 // 2
    assert max(part.total_byte_size for part in parts) <= 2.5 * size
    assert [row.index for row in read_rows([path])] == list(range(40))


def test_a_row_larger_than_a_part_is_a_part_of_its_own(tmp_path):
    tokens = straight(num_turns=2, num_tokens=4096)
    path = tmp_path / "rows.parquet"
    write_rows(path, [row_with(tokens, index) for index in range(3)], chunk_bytes=100)
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 3
    assert [row.tokens for row in read_rows([path])] == [tokens] * 3


LONG = "x" * 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": (Message(role="assistant", content=LONG),)},
        {"messages": (Message(role="assistant", content="", reasoning=LONG),)},
        {"messages": (Message(role="assistant", content="", refusal=LONG),)},
        {
            "messages": (
                Message(
                    role="assistant",
                    content="",
                    tool_calls=(ToolCall(id="1", name="run", arguments=LONG),),
                ),
            )
        },
        {"conversations": ((Message(role="user", content=LONG),),)},
        {"info": (TurnInfo(turn=0, key="out", value=LONG),)},
        {"golden_answers": {"answer": LONG}},
        {"tags": {LONG: "yes"}},
        {"error": LONG},
        {"metrics": {f"number_{index:03d}": 1.0 for index in range(65)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_text_of_every_kind_counts_too(tmp_path, fields):
    """Arrow's texts have offsets of 32 bits, so a part must not hold too many of them."""
    rows = [row_with(None, index, **fields) for index in range(8)]
    write_rows(tmp_path / "rows.parquet", rows, chunk_bytes=4000)
    assert pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 4


def test_lists_of_tokens_have_offsets_of_64_bits(tmp_path):
    write_rows(tmp_path / "rows.parquet", [row_with(straight(2, 40))])
    chain = pyarrow.parquet.read_schema(tmp_path / "rows.parquet").field("chains").type.value_type
    assert pyarrow.types.is_large_list(chain.field("token_ids").type)
    assert pyarrow.types.is_large_list(chain.field("logprobs").type)


def test_writing_and_reading_take_rows_one_by_one(tmp_path):
    """The memory for a file is that of a part, however many rows there are."""
    path, size = tmp_path / "rows.parquet", 256 * 1024

    def peak(num_rows: int) -> int:
        tracemalloc.start()
        rows = (row_with(straight(2, 16_384, seed), seed) for seed in range(num_rows))
        write_rows(path, rows, chunk_bytes=size)
        assert sum(1 for _ in read_rows([path])) == num_rows
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(2)
    assert peak(24) < 1.5 * peak(8)


OLD_TOKENS = {
    "prompt_ids": [[[1, 2], [1, 2, 3, 4, 5], []], None],
    "completion_ids": [[[3, 4], [6], []], None],
    "logprobs": [[[-0.5, -0.25], [-1.0], []], None],
}


def old_file(path: Path) -> None:
    """Write rows as they were before, with the whole prompt of every turn."""
    write_rows(path, [row_with(None, index) for index in range(2)])
    table = pyarrow.parquet.read_table(path).drop_columns(["chains", "turns"])
    for name, values in OLD_TOKENS.items():
        kind = pyarrow.float32() if name == "logprobs" else pyarrow.int32()
        column = pyarrow.array(values, pyarrow.list_(pyarrow.list_(kind)))
        table = table.append_column(name, column)
    pyarrow.parquet.write_table(table, path)


def test_files_with_whole_prompts_are_read(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    old_file(run.rollouts_path / "step-000001.parquet")
    first, second = run.rollouts()
    assert first.tokens[0].chain is first.tokens[1].chain
    assert [ids.tolist() for ids in first.prompt_ids] == OLD_TOKENS["prompt_ids"][0]
    assert [ids.tolist() for ids in first.completion_ids] == OLD_TOKENS["completion_ids"][0]
    assert [values.tolist() for values in first.logprobs] == OLD_TOKENS["logprobs"][0]
    assert second.tokens is None
    assert [row.tokens for row in run.rollouts(with_tokens=False)] == [None, None]


def test_the_folder_of_a_newer_version_is_refused(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    fields = json.loads((run.path / "run.json").read_text())
    # Versions that read up to 2 find no rollouts in files of a hundred steps.
    assert fields["format_version"] == 3
    (run.path / "run.json").write_text(json.dumps(fields | {"format_version": 4}))
    with pytest.raises(ConfigError, match=r"format 4, and this version reads up to 3; upgrade"):
        RunFolder.open(run.path)
    for earlier in (1, 2):
        (run.path / "run.json").write_text(json.dumps(fields | {"format_version": earlier}))
        assert RunFolder.open(run.path).rollouts() == []


def test_turns_without_tokens_are_empty_when_read():
    row = row_with((None, sampled_tokens([1], [2], [-1.0])))
    assert row.prompt_ids == (array("i"), array("i", [1]))
    assert row.logprobs == (array("f"), array("f", [-1.0]))
    assert [values.typecode for values in row.logprobs] == ["f", "f"]
    assert row_with(None).completion_ids is None
