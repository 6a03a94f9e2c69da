"""Where examples may come from, and what is refused before anything is played."""

import asyncio
import json
from typing import ClassVar

import pytest
from tests.asking import ask

from telescope_core import (
    Example,
    GeneratedSource,
    Message,
    RolloutStatus,
    SingleTurnEnvironment,
    Split,
    reward,
)
from telescope_core.environments import sources
from telescope_core.errors import DuplicateIdError, EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient


class Sums(SingleTurnEnvironment):
    """Rewards the answer by the names of the values."""

    @reward
    def correct(self, completion, answer):
        return completion.strip() == answer


def examples_of(environment, split=Split.TRAIN):
    source = environment.fetcher.source(split)
    return [source.example(index) for index in range(source.num_examples)]


def given(value):
    """Return an environment whose `examples` returns `value`."""

    class Given(Sums):
        def examples(self, split):
            return value() if callable(value) else value

    return Given()


ROWS = [{"prompt": f"{n} + 1", "answer": n + 1} for n in range(40)]


def test_a_list_and_a_generator_are_sources():
    made = [Example(id=str(n), prompt="p") for n in range(3)]
    assert examples_of(given(made)) == made
    assert examples_of(given(lambda: (one for one in made))) == made
    assert [one.prompt for one in examples_of(given(["one?", "two?"]))] == ["one?", "two?"]


def numbered(first=0, num_rows=40):
    return (Example(id=f"{n}", prompt=f"{n}?", answer="1") for n in range(first, first + num_rows))


def test_a_generator_as_data_gives_all_splits_and_instances_the_same():
    class Counted(Sums):
        data = numbered()

    class Further(Counted):
        pass

    environments = [Counted(), Counted(), Further()]
    seen = [[examples_of(one, split) for split in Split] for one in environments]
    assert sum(map(len, seen[0])) == 40
    assert all(seen[0])
    assert seen[1:] == [seen[0]] * 2


def test_generators_of_each_split_or_of_one_instance_are_read_once_too():
    class Parted(Sums):
        data = {"train": numbered(), "eval": numbered(first=100)}  # noqa: RUF012

    class Built(Sums):
        def __init__(self, config=None):
            super().__init__(config)
            self.data = numbered()

    assert [len(examples_of(Parted(), split)) for split in (*Split, *Split)] == [40] * 4
    assert all(sum(len(examples_of(one, split)) for split in Split) == 40 for one in (Built(),) * 2)


def test_a_generator_as_data_that_raised_raises_again():
    def rows():
        yield "one?"
        raise ValueError("line 2 is broken")

    class Broken(Sums):
        data = rows()

    for split in (*Split, *Split):
        with pytest.raises(EnvironmentLoadError, match=r"example 1 of data .* line 2 is broken"):
            examples_of(Broken(), split)


@pytest.mark.parametrize("rows", [[], (), iter([])])
def test_data_without_rows_says_so(rows):
    class Empty(Sums):
        data = rows

    with pytest.raises(EnvironmentLoadError, match=r"data of .*Empty .* has no rows"):
        examples_of(Empty())


def test_examples_is_called_once_for_a_split_so_that_a_list_may_be_built_there():
    calls = []

    class Counting(Sums):
        def examples(self, split):
            calls.append(split)
            return [Example(id=f"{split}-{n}", prompt="p") for n in range(2)]

    environment = Counting()
    for _ in range(3):
        assert len(examples_of(environment)) == 2
    examples_of(environment, Split.EVAL)
    assert calls == [Split.TRAIN, Split.EVAL]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_is_a_source_and_a_hash_of_the_ids_divides_it(tmp_path, suffix):
    path = tmp_path / f"sums{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif suffix == ".csv":
        lines = [f'"{row["prompt"]}",{row["answer"]}' for row in ROWS]
        path.write_text("prompt,answer\n" + "\n".join(lines))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        arrow = pytest.importorskip("pyarrow")
        parquet.write_table(arrow.Table.from_pylist(ROWS), path)

    class File(Sums):
        data = path

    train, held_out = examples_of(File()), examples_of(File(), Split.EVAL)
    assert {one.prompt for one in [*train, *held_out]} == {row["prompt"] for row in ROWS}
    assert len(train) + len(held_out) == len(ROWS)
    assert len(train) > len(held_out) > 0
    assert {(one.prompt, one.answer) for one in train} <= {
        (row["prompt"], str(row["answer"])) for row in ROWS
    }


def test_a_path_is_relative_to_the_file_of_the_class_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "solution": "s"}\n')
    (tmp_path / "by_path_sums.py").write_text(
        "from tests.core.environments.test_example_sources import Sums\n"
        "class ByPath(Sums):\n    data = {'train': 'rows.jsonl', 'eval': 'rows.jsonl'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from by_path_sums import ByPath

    class Heir(ByPath):
        pass

    (only,) = examples_of(Heir())
    assert (only.prompt, only.answer) == ("q", "s")


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_a_small_list_has_an_example_for_each_split(num_rows):
    class Few(Sums):
        data = ROWS[:num_rows]

    train, held_out = examples_of(Few()), examples_of(Few(), Split.EVAL)
    assert train
    assert held_out
    assert not {one.id for one in train} & {one.id for one in held_out}


def test_rows_keep_their_ids_and_further_fields_and_equal_prompts_are_one_example():
    class Rows(Sums):
        data: ClassVar = {
            "train": [{"id": 7, "prompt": "p", "answer": 4, "level": "hard"}],
            "eval": [{"prompt": "p"}, {"prompt": "p"}],
        }

    (one,) = examples_of(Rows())
    assert one == Example(id="7", prompt="p", answer="4", info={"level": "hard"})
    assert len(examples_of(Rows(), Split.EVAL)) == 1


def test_draw_gives_endless_examples_whose_splits_are_disjoint():
    class Drawn(Sums):
        def draw(self, random):
            number = random.randint(0, 10**9)
            return Example(id=str(number), prompt=f"{number} + 1", answer=number + 1)

    environment = Drawn()
    sides = {split: environment.fetcher.source(split) for split in Split}
    assert sides[Split.TRAIN].num_examples is None
    ids = {split: {sides[split].example(n).id for n in range(30)} for split in Split}
    assert len(ids[Split.TRAIN]) == 30
    assert not ids[Split.TRAIN] & ids[Split.EVAL]
    first = sides[Split.TRAIN].example(0)
    assert first.answer == str(int(first.id) + 1)
    assert Drawn().fetcher.source(Split.TRAIN).example(0) == first


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"id": b"7"}, "id must be text or a number, got b'7' (bytes); decode it"),
        ({"id": ""}, "id is empty"),
        ({"id": True}, "id must be text or a number, got True (bool)"),
        ({"prompt": b"hello"}, "prompt must be text or a list of Message, got b'hello' (bytes)"),
        ({"prompt": None}, "prompt must be text or a list of Message, got None (NoneType)"),
        ({"prompt": ["hello"]}, "must be Message objects, got 'hello' (str)"),
        ({"prompt": (Message(role="usr", content="p"),)}, "role 'usr'; the roles are system, user"),
        ({"prompt": (Message(role="user", content=None),)}, "must be text, got None (NoneType)"),
        ({"answer": ["4", "four"]}, "several answers, or a structure, belong in info"),
        ({"answer": True}, "answer must be text or a number, got True (bool)"),
        ({"info": {"grid": {1, 2}}}, "info['grid'] is {1, 2} (set), which has no place in JSON"),
        ({"info": {3: "x"}}, "info has the key 3; keys must be text"),
        ({"info": ["x"]}, "info must be a dict, got ['x'] (list)"),
    ],
)
def test_what_could_not_be_played_or_saved_is_refused_by_name(made, said):
    example = Example(**{"id": "seven", "prompt": "p", **made})
    for environment in (given([example]), given(GeneratedSource(lambda *_: example, seed=0))):
        with pytest.raises(EnvironmentLoadError) as error:
            environment.fetcher.source(Split.TRAIN).example(0)
        assert said in str(error.value)
        assert "example 0 of the train examples of given.<locals>.Given (" in str(error.value)


def test_numbers_become_text_and_no_answer_is_an_empty_one():
    made = [
        Example(id=7, prompt="p", answer=4),
        Example(id=8, prompt=[Message(role="user", content="p")], answer=None),
    ]
    first, second = examples_of(given(made))
    assert (first.id, first.answer) == ("7", "4")
    assert (second.id, second.answer, second.prompt[0].content) == ("8", "", "p")


def test_two_examples_with_one_id_are_refused():
    made = [Example(id="a", prompt="one"), Example(id="b", prompt="p"), Example(id="a", prompt="2")]
    with pytest.raises(DuplicateIdError, match=r"examples 0 and 2 of the train .* same id 'a'"):
        given(made).fetcher.source(Split.TRAIN)

    class Lazy:
        num_examples = 3

        def example(self, index):
            return made[index]

    source = given(Lazy()).fetcher.source(Split.TRAIN)
    assert [source.example(0).id, source.example(0).id] == ["a", "a"]
    with pytest.raises(DuplicateIdError, match="examples 0 and 2"):
        source.example(2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "got None (NoneType); is a return missing?"),
        (7, "must be a list of examples, a generator, the path of a file, or a source"),
        (b"sums.jsonl", "got b'sums.jsonl' (bytes)"),
        ("sums.txt", "its name must end in .jsonl, .json, .csv, .tsv, .parquet"),
        ("missing.jsonl", "does not exist; a relative path starts at the folder"),
        ([{"text": "p"}], "has no field question, problem or prompt, only text"),
        ([7], "it must be an Example, a dict with a prompt, or the text of a prompt"),
        ([{"prompt": [{"role": "user"}]}], "must be a Message, or a dict with role and content"),
    ],
)
def test_what_is_no_source_is_refused(value, said):
    with pytest.raises(EnvironmentLoadError) as error:
        given(value).fetcher.source(Split.TRAIN)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"prompt": "p"}\n{"prompt": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", '{"prompt": "p"}\n["p"]\n', "a.jsonl:2 is ['p']; each row must be a JSON obj"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.json", '{\n"prompt": "p"}', "one list of objects, or one object on each line"),
        ("a.csv", "prompt,answer\nadd 1, 2 and 3,6\n", "a.csv:2 does not have the 2 fields"),
        ("a.parquet", "no", "is not a parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(EnvironmentLoadError) as error:
        given(tmp_path / name).fetcher.source(Split.TRAIN)
    assert said in str(error.value)


def test_a_generator_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "MAX_LISTED", 50)

    def forever():
        number = 0
        while True:
            number += 1
            yield {"prompt": f"p{number}"}

    with pytest.raises(EnvironmentLoadError, match=r"50 examples.*draw"):
        given(forever).fetcher.source(Split.TRAIN)


class Empty(Sums):
    def examples(self, split):
        return [{"prompt": next(iter([]))}]


class EmptyGenerator(Sums):
    def examples(self, split):
        yield {"prompt": next(iter([]))}


class Raising(Sums):
    def examples(self, split):
        yield Example(id="a", prompt="p")
        raise KeyError("question")


class LazilyRaising(Sums):
    def draw(self, random):
        return {}["question"]


@pytest.mark.parametrize("opened", [Empty, EmptyGenerator, Raising])
async def test_what_examples_raises_is_an_error_with_its_line(opened):
    client = InProcessEnvironment(opened(), name="it", load_deadline_s=20)
    with pytest.raises(EnvironmentLoadError) as error:
        await asyncio.wait_for(client.describe(), 300)
    await client.close()
    assert opened.__name__ in str(error.value)
    assert "test_example_sources.py:" in str(error.value)
    kind = "KeyError: 'question'" if opened is Raising else "StopIteration"
    assert kind in str(error.value)
    assert ("was called on something empty" in str(error.value)) == (opened is not Raising)


async def test_what_draw_raises_fails_the_rollout_with_its_line():
    client = InProcessEnvironment(LazilyRaising(), name="it")
    rollout = await client.play(ask(), ScriptedClient(["x"]).policy("r"))
    await client.close()
    assert rollout.status is RolloutStatus.FAILED
    assert "LazilyRaising" in rollout.error
    assert "test_example_sources.py:" in rollout.error


async def test_examples_that_are_never_ready_are_given_up_at_a_deadline():
    never = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Waiting(Sums):
        def examples(self, split):
            asyncio.run_coroutine_threadsafe(never.wait(), loop).result()

    client = InProcessEnvironment(Waiting(), name="it", load_deadline_s=0.05)
    with pytest.raises(EnvironmentLoadError, match=r"0\.05 s"):
        await client.describe()
    never.set()
    await client.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def examples(self): return []", "must take (self, split); it takes (self)"),
        ("async def examples(self, split): return []", "must be a plain method: def, not async"),
        ("def draw(self): return None", "must take (self, random)"),
        ("def gold_answer(self): return ''", "must take (self, example)"),
        ("State = 7", "State must be a class that is built without arguments"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_where_the_class_is_defined(body, said):
    with pytest.raises(EnvironmentLoadError) as error:
        exec(f"class Wrong(Sums):\n    {body}", {"Sums": Sums})
    assert said in str(error.value)
