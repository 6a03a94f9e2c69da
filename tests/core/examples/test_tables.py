"""Tables of every form: what a reward sees is what was written, by each way of reading them."""

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.asking import ask

from telescope_core import (
    Example,
    Message,
    SingleTurnEnvironment,
    Split,
    ToolCall,
    reward,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec
from telescope_core.errors import TelescopeError
from telescope_core.examples.rows import as_prompt, distinct, id_of, mark_of
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_envs.validation.fixture_hub import FixtureHub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ODD = [
    *("2019-11-30T08:10:00", "2019-11-30", "0071", "7", "12.50", "1e5", "true", "False", "NA"),
    *("n/a", "null", "nan", "None", "-", " 7 ", "81726354918273645546372819", "0x1F", "1_000"),
    *('say "no"', "a,b", "two\nlines", "\u00fcn\u00efcode \u2212 \U0001f600", "[1, 2]", '{"a": 1}'),
]
"""Texts that one reader or another takes for something else."""
TEXTS = st.sampled_from(ODD) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12
)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
WIDE = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | WIDE | TEXTS
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PROMPTS = st.sampled_from(["Find the secret color.", "2 + 2?", "0042"]) | TEXTS
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": "007"}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "0071"},
]
MESSAGES = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is it?"),
    Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(id="c1", name="look", arguments='{"n": "007"}'),),
    ),
    Message(role="tool", content="0071", tool_call_id="c1"),
)
COLUMNS = {
    "text": TEXTS,
    "number": st.integers(-(2**63), 2**63 - 1),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "is_right": st.booleans(),
    "several": st.lists(TEXTS, max_size=3),
    "structure": st.fixed_dictionaries({"level": st.integers(0, 9), "name": TEXTS}),
}
"""Of parquet, in which a column has one type."""


@st.composite
def tables(draw):
    """Return the form of a table and its rows, some of them the same."""
    form = draw(st.sampled_from(["csv", "tsv", "jsonl", "json", "parquet", "list"]))
    prompt = draw(st.sampled_from(["question", "problem", "prompt"]))
    answer = draw(st.sampled_from(["answer", "solution"]))
    if form in ("csv", "tsv"):
        row = {prompt: PROMPTS, answer: TEXTS, "note": TEXTS}
    elif form == "parquet":
        more = draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True))
        kind = draw(st.sampled_from(["text", "number", "share"]))
        row = {prompt: PROMPTS, answer: COLUMNS[kind], **{name: COLUMNS[name] for name in more}}
    else:
        talks = PROMPTS | st.just(CONVERSATION)
        row = {prompt: talks, answer: TEXTS | NUMBERS | st.none(), "more": NESTED}
    rows = draw(st.lists(st.fixed_dictionaries(row), min_size=1, max_size=5))
    repeats = draw(st.lists(st.sampled_from(rows), max_size=2))
    return form, prompt, answer, [*rows, *repeats]


def write(folder, form, rows):
    """Write `rows` with the writers of others; return what `data =` is given."""
    path = folder / f"rows.{form}"
    if form == "list":
        return rows
    if form in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text(
            "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8"
        )
    return path


def read_by_others(path, form):
    """Return the rows of a file as the usual reader of its form has them."""
    if form == "parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if form == "json":
        return json.loads(path.read_text(encoding="utf-8"))
    if form == "jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    comma = "," if form == "csv" else "\t"
    frame = pandas.read_csv(path, sep=comma, dtype=str, keep_default_na=False, lineterminator=None)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter=comma))
    assert frame.to_dict("records") == rows
    return rows


def words(prompt, answer, info):
    """Return what an example says as one text that tells 1 from 1.0, True and "1"."""
    return json.dumps([repr(prompt), answer, info], sort_keys=True)


def said(rows, prompt, answer):
    """Return what the examples of `rows` must say, each once, in order."""
    found = {}
    for row in rows:
        asked = MESSAGES if row[prompt] == CONVERSATION else row[prompt]
        right = "" if row[answer] is None else str(row[answer])
        more = {name: value for name, value in row.items() if name not in (prompt, answer)}
        found[words(asked, right, more)] = None
    return list(found)


class Seeing(SingleTurnEnvironment):
    """Keeps what its reward was given."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.seen = []

    def examples(self, split):
        return self.rows

    @reward
    def see(self, example: Example) -> float:
        self.seen.append(example)
        return 1.0


async def seen_by_reward(given):
    """Return the examples that the reward of an environment with `given` sees."""
    environment = Seeing(given)
    client = InProcessEnvironment(environment, name="seeing")
    size = (await client.describe()).num_examples[Split.TRAIN]
    for index in range(size):
        policy = ScriptedClient(["x"]).policy(f"r{index}")
        played = await client.play(ask(example_index=index), policy)
        assert played.reward == 1.0, played.error
    await client.close()
    return environment.seen


@pytest.mark.slow
@settings(max_examples=500)
@given(tables())
async def test_a_reward_sees_what_was_written(table):
    form, prompt, answer, rows = table
    with tempfile.TemporaryDirectory() as folder:
        given = write(Path(folder), form, rows)
        wanted = said(rows, prompt, answer)
        if form != "list":
            others = read_by_others(given, form)
            assert json.dumps(others, sort_keys=True) == json.dumps(rows, sort_keys=True)
            spec = DatasetSpec(path=str(given), train_split="", needs_answer=False)
            source = DatasetSource(spec, Split.EVAL)
            found = [source.example(index) for index in range(source.num_examples)]
            assert [words(e.prompt, e.answer, e.info) for e in found] == wanted
            assert source.num_dropped == len(rows) - len(wanted)
        seen = await seen_by_reward(given)
    assert [words(e.prompt, e.answer, e.info) for e in seen] == wanted
    if form != "list":
        assert [one.id for one in found] == [one.id for one in seen]
    assert len({one.id for one in seen}) == len(wanted)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(["1", "2"])), min_size=1
    )
)
def test_prompts_stay_together_and_ids_of_prompts_that_occur_once_stay_as_they_are(pairs):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
    kept = distinct([mark_of(Example(id=id_of(p), prompt=p, answer=a)) for p, a in pairs])
    assert [pairs[one.index] for one in kept] == list(dict.fromkeys(pairs))
    assert sum(one.num_repeats for one in kept) == len(pairs) - len(kept)
    for one in kept:
        prompt = pairs[one.index][0]
        is_alone = len({answer for asked, answer in pairs if asked == prompt}) == 1
        assert (one.id == id_of(prompt)) == is_alone
        assert one.id.startswith(id_of(prompt))

    class Divided(SingleTurnEnvironment):
        """Has its rows divided."""

        data = rows

        @reward
        def correct(self) -> float:
            return 1.0

    if len({prompt for prompt, _ in pairs}) < 2:
        with pytest.raises(TelescopeError, match=f"{len(rows)} rows .* 'train' and 'eval'"):
            Divided().fetcher.source(Split.TRAIN)
        return
    sources = {split: Divided().fetcher.source(split) for split in Split}
    parts = {s: [one.example(n) for n in range(one.num_examples)] for s, one in sources.items()}
    assert sum(map(len, parts.values())) == len(kept)
    train, held_out = ({one.prompt for one in parts[split]} for split in Split)
    assert train
    assert held_out
    assert not train & held_out
    assert sum(one.num_dropped for one in sources.values()) == len(rows) - len(kept)


def test_rows_of_one_prompt_are_as_many_examples_and_stay_together_in_a_dataset(tmp_path):
    rows = [{"question": f"q{n % 20}", "answer": str(n)} for n in range(60)]
    path = write(tmp_path, "jsonl", rows)
    parts = {}
    for split in Split:
        source = DatasetSource(DatasetSpec(path=str(path)), split)
        parts[split] = [source.example(index) for index in range(source.num_examples)]
        assert source.num_dropped == 0
    assert sum(map(len, parts.values())) == 60
    assert parts[Split.EVAL]
    assert not {e.prompt for e in parts[Split.TRAIN]} & {e.prompt for e in parts[Split.EVAL]}


def test_what_a_dataset_holds_out_is_counted(tmp_path):
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(6)]
    (tmp_path / "own").mkdir()
    for split, part in (("train", [*rows, rows[0]]), ("test", rows[4:])):
        write(tmp_path, "jsonl", part).rename(tmp_path / "own" / f"{split}.jsonl")
    spec = DatasetSpec(path=str(tmp_path / "own"), cache_dir=str(tmp_path / "cache"))
    source = DatasetSource(spec, Split.TRAIN)
    assert (source.num_examples, source.num_dropped) == (4, 3)
    assert DatasetSource(spec, Split.EVAL).num_dropped == 0


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("a.jsonl", '{"prompt": "p"}\n{"prompt": null}\n', ("row 2", "'prompt'", "None")),
        ("a.jsonl", '{"prompt": 7}\n', ("row 1", "'prompt'", "7")),
        ("a.jsonl", '{"prompt": "p", "answer": ["B", "C"]}\n', ("row 1", "'answer'", "in info")),
        ("a.jsonl", '{"prompt": "p", "solution": true}\n', ("row 1", "'solution'", "True")),
        ("a.jsonl", '{"prompt": "p", "answer": NaN}\n', ("row 1", "'answer'", "nan")),
        ("a.jsonl", '{"prompt": "p", "answer": "1", "answer": "2"}\n', (":1", "'answer'", "twice")),
        ("a.jsonl", '{"prompt": "p", "answer": 1e999}\n', (":1", "1e999", "write it as text")),
        (
            "a.jsonl",
            '{"prompt": "p", "x": 0.1234567890123456789}\n',
            (":1", "0.1234567890123456789"),
        ),
        ("a.jsonl", '{"prompt": "p", "x": 9007199254740993.0}\n', (":1", "9007199254740993.0")),
        (
            "a.jsonl",
            f'{{"prompt": "p", "x": [{2**64}]}}\n',
            ("row 1", "info['x']", "write it as text"),
        ),
        ("a.jsonl", '{"prompt": "p", "answer": "\\ud800"}\n', ("row 1", "answer", "surrogate")),
        ("a.jsonl", '{"prompt": "p", "x": ' + "9" * 5000 + "}\n", (":1", "digits")),
        ("a.csv", "prompt,answer,answer\np,1,2\n", ("a.csv:1", "2 fields 'answer'")),
        ("a.csv", 'prompt,answer\np,"1"2\n', ("a.csv:2", "write each quote in it twice")),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": null}]}\n',
            ("row 1", "'prompt'", "message 0", "role and content"),
        ),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "a", "name": "Bo"}]}\n',
            ("row 1", "'prompt'", "message 0", "'name'"),
        ),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": {"text": "a"}}]}\n',
            ("row 1", "'prompt'", "message 0", "text or a list of parts"),
        ),
    ],
)
@pytest.mark.parametrize("way", ["data", "dataset"])
def test_what_cannot_be_kept_is_refused_by_file_row_and_field(tmp_path, way, name, text, facts):
    path = tmp_path / name
    path.write_text(text)
    spec = DatasetSpec(path=str(path), train_split="", needs_answer=False)
    given = path if way == "data" else DatasetSource(spec, Split.EVAL)
    with pytest.raises(TelescopeError) as error:
        Seeing(given).fetcher.source(Split.TRAIN).example(0)
    for fact in (str(path), *facts):
        assert fact in str(error.value)


def test_arguments_of_calls_may_be_objects_and_a_call_must_have_a_name(tmp_path):
    call = {"id": "c", "function": {"name": "look", "arguments": {"path": "\u00fc", "n": None}}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    message = as_prompt(turns)[0]
    assert json.loads(message.tool_calls[0].arguments) == {"path": "\u00fc", "n": None}
    for wrong in (
        {"id": "c"},
        {"function": {"name": 7}},
        {"function": {"name": "a", "arguments": 7}},
    ):
        with pytest.raises(TelescopeError, match="message 0: a call of its tool_calls is"):
            as_prompt([{**turns[0], "tool_calls": [wrong]}])


@pytest.mark.parametrize(
    "text", ["0.1", "1e5", "0.10000000000000001", "5e-324", "1.7976931348623157e308"]
)
def test_numbers_that_64_bits_hold_are_read(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "p", "x": {text}}}\n')
    (one,) = [Seeing(tmp_path / "a.jsonl").fetcher.source(Split.TRAIN).example(0)]
    assert one.info["x"] == json.loads(text)


def test_parquet_columns_without_a_place_in_an_example_are_refused_by_name(tmp_path):
    table = pyarrow.table({"prompt": ["p"], "when": pandas.to_datetime(["2019-11-30"])})
    pyarrow.parquet.write_table(table, tmp_path / "a=b.parquet")
    with pytest.raises(TelescopeError, match=r"a=b\.parquet, row 1 .*info\['when'\]"):
        Seeing(tmp_path / "a=b.parquet").fetcher.source(Split.TRAIN)


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_read_as_it_is_written_with_and_without_a_network(tmp_path):
    rows = [{"question": f"q{n}", "answer": text, "note": text} for n, text in enumerate(ODD)]
    for form in ("csv", "tsv", "jsonl", "parquet"):
        folder = tmp_path / "hub" / "acme" / form
        folder.mkdir(parents=True)
        write(folder, form, rows).rename(folder / f"train.{form}")
    program = f"""
import json
from telescope_core import Split
from telescope_core.dataset_source import DatasetSource, DatasetSpec
for form in ("csv", "tsv", "jsonl", "parquet"):
    spec = DatasetSpec(path=f"acme/{{form}}", revision="{COMMIT}", train_split="",
                       eval_split="train", cache_dir="cache")
    source = DatasetSource(spec, Split.EVAL)
    found = [source.example(n) for n in range(source.num_examples)]
    print(json.dumps([[one.prompt, one.answer, one.info] for one in found]))
"""
    with FixtureHub(tmp_path / "hub") as hub:
        variables = {**os.environ, **hub.environ(tmp_path / "home")}
        for more in ({}, {"HF_HUB_OFFLINE": "1"}):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**variables, **more},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            wanted = [[row["question"], row["answer"], {"note": row["note"]}] for row in rows]
            assert [json.loads(line) for line in done.stdout.splitlines()] == [wanted] * 4
