"""Tables as example sources: local files and folders, read by the real library, offline."""

import json
import sys

import pytest

from telescope_core import ConfigError, Example, Message, Split
from telescope_core.dataset_source import DatasetSource, DatasetSpec, as_prompt, load_table
from telescope_core.errors import EnvironmentLoadError
from telescope_core.examples import split_of

ROWS = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(60)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Any attempt to reach the Hub fails at once."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def spec(path, tmp_path, **more):
    return DatasetSpec(path=str(path), cache_dir=str(tmp_path / "cache"), **more)


def examples(source):
    return [source.example(index) for index in range(source.num_examples)]


def test_a_hub_that_cannot_be_reached_is_told_after_two_tries(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    tried = []
    ask = huggingface_hub.get_hf_file_metadata
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda *a, **k: tried.append(a) or ask(*a, **k)
    )
    # An address of a loopback port on which nothing listens.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    away = spec("someone/sums", tmp_path, revision="a" * 40)
    with pytest.raises(EnvironmentLoadError, match=r"127\.0\.0\.1:9 cannot be reached.*HF_HOME"):
        DatasetSource(away, Split.TRAIN).example(0)
    assert len(tried) == 2


def test_a_file_is_divided_by_example_id_and_the_same_every_time(tmp_path):
    path = write(tmp_path / "sums.jsonl", [*ROWS, ROWS[0]])
    parts = {split: examples(DatasetSource(spec(path, tmp_path), split)) for split in Split}
    assert sorted(e.prompt for part in parts.values() for e in part) == sorted(
        row["question"] for row in ROWS
    )
    assert parts[Split.EVAL]
    assert all(split_of(e.id) is split for split, part in parts.items() for e in part)
    assert examples(DatasetSource(spec(path, tmp_path), Split.EVAL)) == parts[Split.EVAL]
    one = parts[Split.TRAIN][0]
    assert one.answer == str(2 * int(str(one.prompt).partition("+")[0]))


def test_parquet_with_fields_of_ones_own_and_a_prompt_of_messages(tmp_path):
    import pyarrow
    import pyarrow.parquet

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"chat": [turns] * 3, "gold": ["4"] * 3}), path)
    chosen = spec(path, tmp_path, prompt_field="chat", answer_field="gold")
    found = [e for split in Split for e in examples(DatasetSource(chosen, split))]
    assert [(e.prompt, e.answer) for e in found] == [
        ((Message(role="system", content="Be brief."), Message(role="user", content="2+2?")), "4")
    ]


def test_the_cluster_is_a_field_of_text_or_numbers_and_stays_in_the_info(tmp_path):
    rows = [{"question": f"{n}?", "answer": "1", "passage": n % 2} for n in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    chosen = spec(path, tmp_path, cluster_field="passage")
    found = [e for split in Split for e in examples(DatasetSource(chosen, split))]
    assert sorted(e.cluster for e in found) == ["0", "0", "1", "1"]
    assert all(e.info == {"passage": int(e.cluster)} for e in found)
    for value, cluster in (("a", "a"), (["a"], ""), (None, ""), (True, "")):
        path = write(tmp_path / "own.jsonl", [{"question": "1?", "answer": "1", "cluster": value}])
        (one,) = (e for s in Split for e in examples(DatasetSource(spec(path, tmp_path), s)))
        assert one.cluster == cluster


@pytest.mark.parametrize("is_folder", [False, True])
def test_calls_from_parquet_have_the_arguments_that_somebody_wrote(tmp_path, is_folder):
    """Each struct of a column has the keys of all others, as nulls."""
    import pyarrow
    import pyarrow.parquet

    def turns(*given):
        calls = [
            {"id": str(i), "function": {"name": "f", "arguments": arguments}}
            for i, arguments in enumerate(given)
        ]
        return [
            {"role": "user", "content": "2+2?", "tool_calls": None},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]

    rows = [
        {"prompt": turns({"city": "Oslo"}, {"at": {"x": 1}, "n": [{"y": 2}]}, None)},
        {"prompt": turns({"at": {"z": 3}, "n": [{"w": 4}]})},
    ]
    path = tmp_path / "data" / "train.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    table = load_table(spec(path.parent if is_folder else path, tmp_path), "train")
    found = [
        [json.loads(call.arguments) for call in as_prompt(row["prompt"])[1].tool_calls]
        for row in table
    ]
    expected = [
        [{"city": "Oslo"}, {"at": {"x": 1}, "n": [{"y": 2}]}, {}],
        [{"at": {"z": 3}, "n": [{"w": 4}]}],
    ]
    assert found == expected
    assert (len(table), as_prompt(table[1]["prompt"])) == (2, as_prompt([*table][1]["prompt"]))


@pytest.mark.slow
def test_a_folder_has_splits_and_what_is_held_out_is_not_trained_on(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS)
    write(folder / "test.jsonl", ROWS[:5])
    parts = {
        split: {e.prompt for e in examples(DatasetSource(spec(folder, tmp_path), split))}
        for split in Split
    }
    assert parts[Split.EVAL] == {row["question"] for row in ROWS[:5]}
    assert parts[Split.TRAIN] == {row["question"] for row in ROWS[5:]}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_dataset_for_evals_alone_is_not_divided(tmp_path, form):
    path = tmp_path / ("only.jsonl" if form == "file" else "only")
    if form == "folder":
        path.mkdir()
    write(path if form == "file" else path / "test.jsonl", ROWS)
    only = spec(path, tmp_path, train_split="")
    assert len(examples(DatasetSource(only, Split.EVAL))) == len(ROWS)
    with pytest.raises(ConfigError, match="is for evals and has no examples to train on"):
        DatasetSource(only, Split.TRAIN).example(0)


def test_rows_become_examples_as_the_author_says(tmp_path):
    path = write(tmp_path / "own.json", [{"n": n} for n in range(30)])

    def make(row):
        return Example(id=f"row-{row['n']}", prompt=f"count to {row['n']}", info={"n": row["n"]})

    found = [
        e
        for split in Split
        for e in examples(DatasetSource(spec(path, tmp_path), split, make=make))
    ]
    assert sorted(e.info["n"] for e in found) == list(range(30))


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"question": "1?", "answer": ""}], {}, "the row '1?' has an empty answer field"),
        ([{"question": "1?", "answer": None}], {}, "has an empty answer field 'answer'"),
        (
            [{"text": "1?"}],
            {},
            "has no field question, problem, prompt; set prompt_field to one of its fields: text",
        ),
        (
            [{"question": "1?"}],
            {"answer_field": "gold"},
            "has no field 'gold'; set answer_field to one of its fields: question",
        ),
        (
            [{"question": "1?"}],
            {"cluster_field": "passage"},
            "has no field 'passage'; set cluster_field to one of its fields: question",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_one_message(tmp_path, rows, more, message):
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ConfigError) as refused:
        examples(DatasetSource(spec(path, tmp_path, **more), Split.TRAIN))
    assert message in str(refused.value)
    assert "bad.jsonl" in str(refused.value)


def test_answers_may_be_missing_where_that_is_meant(tmp_path):
    path = write(tmp_path / "open.jsonl", [{"question": "1?", "answer": None}])
    source = {s: DatasetSource(spec(path, tmp_path, needs_answer=False), s) for s in Split}
    assert [e.answer for split in Split for e in examples(source[split])] == [""]


def test_the_rows_of_a_list_are_counted_from_1(tmp_path):
    (tmp_path / "list.json").write_text('[{"question": "1?"}, 7]')
    with pytest.raises(EnvironmentLoadError, match=r"list\.json, item 2 is 7"):
        load_table(spec(tmp_path / "list.json", tmp_path), "train")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("acme/sums", "on the Hub needs a revision; set it to a commit"),
        ("missing.jsonl", "dataset file 'missing.jsonl' does not exist"),
        ("hf://datasets/acme/sums/a.parquet", "a folder of files, or the id of a dataset"),
        ("rows/*.jsonl", "patterns are not read"),
        (__file__, "must end in .jsonl, .json, .csv, .tsv, .parquet"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_message(tmp_path, path, message):
    with pytest.raises((ConfigError, EnvironmentLoadError)) as refused:
        DatasetSource(spec(path, tmp_path), Split.TRAIN).example(0)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["README.md", "test.jsonl"])
def test_a_folder_without_data_for_a_split_is_told_without_asking_the_hub(tmp_path, name):
    (tmp_path / "some").mkdir()
    write(tmp_path / "some" / name, ROWS[:1])
    with pytest.raises(EnvironmentLoadError, match=r"split 'train' of dataset .*some'.*\.parquet"):
        load_table(spec(tmp_path / "some", tmp_path), "train")


@pytest.mark.parametrize("other", ["b.parquet", "sub/b.csv", "b.tsv"])
def test_a_folder_of_two_formats_is_refused_unless_its_card_chooses(tmp_path, other):
    folder = tmp_path / "two"
    (folder / ".cache").mkdir(parents=True)
    (folder / "sub").mkdir()
    write(folder / "a.jsonl", ROWS[:12])
    for beside in (".cache/c.csv", ".d.csv", "dataset_infos.json"):
        (folder / beside).write_text("{}")
    chosen = spec(folder, tmp_path)
    assert len(load_table(chosen, "train")) == 12
    (folder / other).write_text("question,answer\n1?,1\n")
    with pytest.raises(ConfigError, match=f"two'.*a.jsonl.*{other}|two'.*{other}.*a.jsonl"):
        load_table(chosen, "train")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n"
    )
    assert len(load_table(chosen, "train")) == 12


@pytest.mark.parametrize("card", [b"---\na: [\n---\n", b"---\n- a\n---\n", b"\xff\xfe"])
def test_a_card_that_cannot_be_read_is_named(tmp_path, card):
    folder = tmp_path / "some"
    folder.mkdir()
    write(folder / "a.jsonl", ROWS[:3])
    (folder / "README.md").write_bytes(card)
    with pytest.raises(EnvironmentLoadError, match=r"some'.*README\.md cannot be read"):
        load_table(spec(folder, tmp_path), "train")


def test_a_file_that_is_in_no_split_of_its_folder_is_told_and_not_left_out(tmp_path, monkeypatch):
    folder = tmp_path / "more"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for name, rows in (("part-1", ROWS[:3]), ("part-2", ROWS[3:9])):
        write(folder / f"{name}.jsonl", rows)
    chosen = spec("more", tmp_path)
    assert len(load_table(chosen, "train")) == 9
    (folder / "part-1.jsonl").rename(folder / "train.jsonl")
    with pytest.raises(ConfigError, match=r"no split of it holds \(part-2.jsonl\)"):
        load_table(chosen, "train")
    (folder / "part-2.jsonl").rename(folder / "train-more.jsonl")
    assert len(load_table(chosen, "train")) == 9


def test_nothing_is_read_before_it_is_asked_for_and_the_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "train.jsonl", ROWS)
    source = DatasetSource(spec(tmp_path / "a", tmp_path), Split.TRAIN)
    with pytest.raises(EnvironmentLoadError) as refused:
        source.example(0)
    assert isinstance(refused.value.__cause__, ImportError)
    assert "telescope-core[datasets]" in str(refused.value)


def test_a_revision_is_declared_only_where_there_is_one(tmp_path):
    assert DatasetSpec(path="acme/sums", revision="0" * 40).revisions() == {"acme/sums": "0" * 40}
    assert spec(tmp_path, tmp_path).revisions() == {}


@pytest.mark.parametrize(
    ("folder", "split", "numbers"),
    [
        ("one", "train", range(9)),
        ("one", "train[2:4]", range(2, 4)),
        ("several", "train_sft", range(9)),
        ("several", "extra", range(3)),
        ("several", "extra[:1]+train_sft[8:]", (0, 8)),
        ("apart", "train", range(9)),
        ("apart", "test", range(3)),
    ],
)
def test_a_folder_of_save_to_disk_is_read_with_the_splits_that_it_has(
    tmp_path, folder, split, numbers
):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"question": f"{n}?", "n": n} for n in range(9)])
    few = rows.select(range(3)).with_format("numpy", columns=["n"])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train_sft=rows, extra=few).save_to_disk(tmp_path / "several")
    for name, part in (("train", rows), ("test", few)):
        part.save_to_disk(tmp_path / "apart" / name)
    table = load_table(spec(tmp_path / folder, tmp_path), split)
    assert list(table) == [{"question": f"{n}?", "n": n} for n in numbers]


@pytest.mark.parametrize(
    ("about", "split", "fact"),
    [
        ({}, "test", r"\"test\".*train.*name one of its splits"),
        ({"subset": "main"}, "train", "no subsets; remove"),
    ],
)
def test_what_a_folder_of_save_to_disk_does_not_have_is_told(tmp_path, about, split, fact):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    with pytest.raises(EnvironmentLoadError, match=fact):
        load_table(spec(tmp_path / "one", tmp_path, **about), split)


def test_an_empty_row_is_told_by_its_number(tmp_path):
    path = write(tmp_path / "sums.jsonl", [ROWS[0], {}])
    with pytest.raises(ConfigError, match=r"row 2 of .*has an empty row; remove it"):
        DatasetSource(spec(path, tmp_path), Split.TRAIN).example(0)
