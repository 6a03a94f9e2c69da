"""Search tools: the local index, pages in parts, texts in pages, and answers that are the same."""

import asyncio
import json

import pytest
from tests.asking import ask

from telescope_core import Example, RolloutStatus, Sampling, ToolConfig, reward
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.search import (
    LocalCorpus,
    Page,
    SearchEnvironment,
    SearchError,
    is_same_answer,
    plain_answer,
)
from telescope_core.search.environment import opened, parts_of, places_of

PAGES = [
    Page(address="a", title="Bridges", text="The old bridge was built by Edda Voss."),
    Page(address="b", title="Edda Voss", text="Edda Voss was born in Kelmere. " * 30),
    Page(address="c", title="Kelmere", text="A town with a bridge and a mill."),
]

DATA = {split: [Example(id="1", prompt="Where?", answer="Kelmere")] for split in ("train", "eval")}


class Pages(SearchEnvironment):
    """Pages of a test."""

    data = DATA

    def open_backend(self):
        return LocalCorpus(PAGES)

    @reward
    def read(self, episode) -> float:
        return float(opened(episode) == {"b"})


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment, replies):
    client = InProcessEnvironment(environment, name="pages")
    request = ask(sampling=Sampling(max_tokens=16))
    rollout = await client.play(request, ScriptedClient(replies).policy("r"))
    told = [one.content for one in rollout.messages if "<tool_response>" in one.content]
    return rollout, told


async def test_the_words_of_a_title_count_most_and_any_word_finds():
    corpus = LocalCorpus(PAGES)
    assert len(corpus) == 3
    assert [hit.address for hit in await corpus.search("edda voss", 5)] == ["b", "a"]
    assert [hit.address for hit in await corpus.search("mills nowhere", 5)] == ["c"]
    assert [hit.address for hit in await corpus.search("bridge town", 1)] == ["c"]
    assert await corpus.search("?!", 5) == []
    assert await corpus.page("d") is None
    assert await corpus.page("c") == PAGES[2]


@pytest.mark.parametrize(
    "query", ['"', "a OR", "NEAR(", "title:x", "*", "x" * 5000, "^a", "a\0b", "x " * 5000]
)
async def test_no_query_is_a_program(query):
    assert len(await LocalCorpus(PAGES).search(query, 3)) <= 3


async def test_searches_from_many_threads():
    corpus = LocalCorpus(PAGES)
    found = await asyncio.gather(*(corpus.search("kelmere mill", 2) for _ in range(100)))
    assert {tuple(hit.address for hit in hits) for hits in found} == {("c", "b")}


def test_two_pages_at_one_address_are_refused():
    with pytest.raises(EnvironmentLoadError, match="same address"):
        LocalCorpus([PAGES[0], PAGES[0]])


async def test_tools_search_open_and_find():
    settings = {"part_characters": 200, "max_results": 2}
    rollout, told = await play(
        Pages.from_settings(settings),
        [
            call("search", query="voss"),
            call("open", address="b", part=2),
            call("find", address="b", text="KELMERE"),
            call("find", address="b", text="dragon"),
            call("open", address="b", part=99),
            call("open", address="nowhere"),
            call("search", query=" "),
            "done",
        ],
    )
    assert "address: b" in told[0]
    assert "address: c" not in told[0]
    assert "Edda Voss (part 2 of 5)" in told[1]
    assert told[2].count("...") >= 4
    assert "'dragon' is not in Edda Voss" in told[3]
    assert "has the parts 1 to 5, and not 99" in told[4]
    assert "there is no page at 'nowhere'" in told[5]
    assert "the query is empty" in told[6]
    assert rollout.metrics["tool_errors/refused"] == 3
    assert rollout.reward == 1.0


async def test_a_backend_that_fails_fails_the_rollout():
    class Broken(Pages):
        """Its search is down."""

        def open_backend(self):
            corpus = LocalCorpus(PAGES)

            async def search(query, limit):
                raise SearchError("search.example answered 503")

            corpus.search = search
            return corpus

    rollout, _ = await play(Broken.from_settings({}), [call("search", query="x"), "done"])
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward is None
    assert "SearchError: search.example answered 503" in rollout.error


def test_an_environment_needs_a_backend_and_settings_for_it():
    class Nothing(SearchEnvironment):
        """Has no pages."""

        data = DATA

        @reward
        def one(self) -> float:
            return 1.0

    with pytest.raises(EnvironmentLoadError, match="must define open_backend"):
        Nothing.from_settings({}).open_backend()
    with pytest.raises(ConfigError, match="max_results"):
        Pages.from_settings({"max_results": 0})
    assert issubclass(Pages.Config, ToolConfig)


@pytest.mark.parametrize("size", [7, 20, 1000])
def test_parts_hold_the_whole_text(size):
    text = "one two three\nfour five six " * 10 + "x" * 50
    parts = parts_of(text, size)
    assert all(len(part) <= size for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_places_of_a_text():
    assert places_of("b", "a b c") == ["a b c"]
    assert places_of("", "a b c") == []
    assert len(places_of("x", "x " * 10_000)) == 8
    assert places_of("\u0130", "\u0130stanbul") == ["\u0130stanbul"]


def test_answers_are_the_same_up_to_how_they_are_written():
    assert is_same_answer("The  Kelmere.", "kelmere")
    assert is_same_answer("L\u00fcbeck", "Lubeck")
    assert not is_same_answer("", "")
    assert not is_same_answer("the", "a")
    assert not is_same_answer("Kelmere or Tarn", "Kelmere")
    assert not is_same_answer("x" * 2000, "x" * 1000)
    assert plain_answer("An  \u00c9cole, the one!") == "ecole one"
    # What is no punctuation in a number.
    assert is_same_answer("1,114.", "1114")
    assert is_same_answer("\u22125", "-5")
    assert is_same_answer("1990-2000", "1990 2000")
    assert not is_same_answer("-1114", "1114")
    assert not is_same_answer("1.5", "1 5")
    assert not is_same_answer("-3.5", "3.5")
    assert not is_same_answer("-5", "5")
    assert not is_same_answer("1.5", "15")
    assert not is_same_answer("1 5", "15")


@pytest.mark.parametrize(
    "same",
    [
        ["U.S.", "US", "the U. S.", "u.s"],
        ["U.S.A.", "U.S.A", "U. S. A.", "USA"],
        ["J.R.R. Tolkien", "J. R. R. Tolkien", "J R R Tolkien", "JRR Tolkien"],
        ["O'Neil", "O\u2019Neil", "ONeil"],
        ["A.A. Milne", "A. A. Milne", "AA Milne"],
        ["Ph.D.", "PhD"],
        ["C++", "c++."],
        ["C#"],
        ["C"],
        ["Plan A", "plan a."],
        ["B, C"],
        ["AT&T", "AT & T"],
        ["well-known", "well known", "a well-known"],
    ],
)
def test_names_are_the_same_up_to_how_they_are_written(same):
    assert len({plain_answer(one) for one in same}) == 1
    others = {"C", "C++", "C#", "C+", "S", "Milne", "Neil", "BC", "US 5"} - set(same)
    assert not any(is_same_answer(same[0], other) for other in others)
