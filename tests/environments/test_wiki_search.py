"""Wiki search: the planted facts, a policy that follows them, the reward, and other corpora."""

import json
import re

import pytest
from tests.asking import ask

from telescope_core import Sampling, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_wiki_search import WikiSearch
from telescope_env_telescope_wiki_search.questions import questions_of
from telescope_env_telescope_wiki_search.world import make_world


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment, replies, *, index=0):
    request = ask(split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16))
    client = InProcessEnvironment(environment, name="wiki")
    return await client.play(request, ScriptedClient(replies).policy("r"))


def test_every_answer_stands_on_the_second_page_and_not_in_the_question():
    world = make_world()
    text_of = {page.title: page.text for page in world.pages}
    asked = list(questions_of(world))
    assert len(world.pages) == len(world.things) >= 300
    assert len({one.text for one in asked}) == len(asked) >= 900
    for one in asked:
        assert one.second in text_of[one.first]
        assert one.answer in text_of[one.second]
        assert one.answer not in one.text
    assert make_world() == world


async def test_a_policy_that_reads_what_it_finds_is_right():
    """It knows the forms of sentences, and nothing of the world."""

    def reader(messages) -> str:
        question = next(one.content for one in messages if one.role == "user")
        told = [one.content for one in messages if "<tool_response>" in one.content]
        if len(told) in (0, 2):
            name = re.search(r"(?:of|by) (?:the )?(.+?) born\?", question)[1]
            seen = re.search(r"designed by ([\w ]+)\.|novel by ([\w ]+)\.", "".join(told))
            return call("search", query=name if not told else seen[1] or seen[2])
        if len(told) in (1, 3):
            return call("open", address=re.search(r"address: (\S+)", told[-1])[1])
        return f"<answer>{re.search(r'born in (.+?) in ', told[-1])[1]}</answer>"

    environment = WikiSearch()
    source = environment.examples(Split.EVAL)
    asked = re.compile(r"In which town was the (architect|author) of")
    chosen = [
        index for index in range(source.num_examples) if asked.match(source.example(index).prompt)
    ]
    assert len(chosen) >= 10
    for index in chosen:
        rollout = await play(environment, reader, index=index)
        assert rollout.reward == pytest.approx(1.0), rollout.messages
        assert rollout.metrics["pages_read"] == 2


async def test_parts_of_the_reward():
    environment = WikiSearch()
    example = environment.examples(Split.EVAL).example(0)
    right, first = f"<answer>the {example.answer.upper()}.</answer>", example.info["sources"][0]
    for replies, reward in [
        ([right], 0.9),
        ([call("open", address=first), right], 0.95),
        ([call("open", address=first), "<answer>Nowhere</answer>"], 0.05),
        ([call("open", address=first)] * 3 + ["<answer></answer>"], 0.05),
        ([f"{example.answer}"], 0.0),
        ([f"<answer>{example.answer} or Nowhere</answer>"], 0.0),
    ]:
        rollout = await play(environment, replies)
        assert rollout.reward == pytest.approx(reward), replies


@pytest.fixture
def own_tables(tmp_path):
    """Pages and questions as files, in the columns that datasets of pages have."""
    pages = [{"name": f"Town {n}", "body": f"Town {n} has {n} mills."} for n in range(1, 30)]
    asked = [{"question": f"How many mills has Town {n}?", "answer": str(n)} for n in range(1, 30)]
    for name, rows in (("pages", pages), ("questions", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "corpus": str(tmp_path / "pages.jsonl"),
        "questions": str(tmp_path / "questions.jsonl"),
        "title_field": "name",
        "text_field": "body",
    }


async def test_pages_and_questions_of_ones_own(own_tables):
    environment = WikiSearch.from_settings(own_tables)
    assert environment.network == "none"
    ids = {
        split: {source.example(index).id for index in range(source.num_examples)}
        for split in Split
        for source in [environment.examples(split)]
    }
    assert len(ids[Split.TRAIN] | ids[Split.EVAL]) == 29
    assert not ids[Split.TRAIN] & ids[Split.EVAL]
    example = environment.examples(Split.EVAL).example(0)
    rollout = await play(
        environment,
        [call("search", query=example.prompt), environment.gold_answer(example)[-1]],
    )
    assert rollout.reward == 1.0
    assert "Write" not in rollout.messages[1].content
    assert "<answer>" in rollout.messages[1].content
    assert f"Town {example.answer}\n" in rollout.messages[3].content


def test_settings_of_ones_own_are_checked(own_tables):
    with pytest.raises(ConfigError, match="corpus and questions together"):
        WikiSearch.from_settings({"corpus": own_tables["corpus"]})
    with pytest.raises(ConfigError, match="it has: name, body"):
        WikiSearch.from_settings({**own_tables, "text_field": "text"}).open_backend()
    on_hub = {**own_tables, "corpus": "someone/pages", "corpus_revision": "c" * 40}
    environment = WikiSearch.from_settings(on_hub)
    assert environment.network == "load"
    assert environment.dataset_revisions() == {"someone/pages": "c" * 40}
