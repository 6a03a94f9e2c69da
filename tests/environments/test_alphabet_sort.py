"""Alphabet sort: a policy that reads only the conversation, shares of lists, lost turns."""

import itertools
import re

import pytest
from tests.asking import ask

from telescope_core import Sampling, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_alphabet_sort import AlphabetSort
from telescope_env_telescope_alphabet_sort.environment import read_list, share_in_order
from telescope_env_telescope_alphabet_sort.sequences import longest_common


def slow_common(left, right) -> int:
    """Try every choice of items of the left list."""
    return max(
        size
        for size in range(len(left) + 1)
        for part in itertools.combinations(left, size)
        if part in set(itertools.combinations(right, size))
    )


def test_the_longest_common_part_of_small_lists():
    for left in itertools.product("ab", repeat=3):
        for right in itertools.product("abc", repeat=4):
            assert longest_common(left, right) == slow_common(left, right)


def sorter(messages) -> str:
    """Sort all names that were asked for so far, by what the first message says."""
    asked = [message.content for message in messages if message.role == "user"]
    key = 0 if "by first name" in asked[0] else 1
    names = [name for text in asked for name in re.findall(r"^\w+ \w+$", text, re.MULTILINE)]
    listed = "\n".join(sorted(names, key=lambda name: name.split()[key]))
    return f"Here they are.\n<sorted>\n{listed}\n</sorted>"


async def play(environment, replies, *, index=0):
    request = ask(split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16))
    client = InProcessEnvironment(environment, name="sort")
    return await client.play(request, ScriptedClient(replies).policy("r"))


async def test_a_policy_that_keeps_what_it_was_told_is_right():
    environment = AlphabetSort(AlphabetSort.Config(min_rounds=3, max_rounds=3))
    rollouts = [await play(environment, sorter, index=index) for index in range(10)]
    assert [rollout.reward for rollout in rollouts] == [1.0] * 10
    assert {len(rollout.turns) for rollout in rollouts} == {3}
    assert {rollout.metrics["last_share"] for rollout in rollouts} == {1.0}


async def test_a_policy_that_forgets_earlier_names_loses():
    environment = AlphabetSort(AlphabetSort.Config(min_rounds=3, max_rounds=3))

    def forgetful(messages) -> str:
        return sorter([messages[0], messages[-1]] if len(messages) > 1 else messages)

    rollout = await play(environment, forgetful)
    assert 1 / 3 <= rollout.reward < 0.9
    assert rollout.metrics["last_share"] < 1.0


async def test_turns_that_were_not_taken_count_nothing():
    environment = AlphabetSort(AlphabetSort.Config(min_rounds=4, max_rounds=4, power=1.0))
    gold = environment.gold_answer(environment.examples(Split.EVAL).example(0))
    rollout = await play(environment, [gold[0], "", "", ""])
    assert rollout.reward == pytest.approx(0.25)


def test_the_share_in_order():
    wanted = ["Ada B", "Carl D", "Edda F", "Greta H"]
    assert share_in_order(wanted, wanted) == 1.0
    assert share_in_order(wanted[::-1], wanted) == 0.25
    assert share_in_order([*wanted, "Ada B"], wanted) == 0.8
    assert share_in_order(wanted[:3], wanted) == 0.75
    assert share_in_order([], wanted) == 0.0
    assert share_in_order(["x"] * 10_000, wanted) == 0.0


def test_reading_a_list():
    text = "<sorted>old</sorted> no:\n<sorted>\n Ada   B \n\nCarl D\n</sorted>"
    assert read_list(text) == ["Ada B", "Carl D"]
    assert read_list("Ada B\nCarl D") == []


def test_the_names_are_never_in_order_already_and_keys_are_distinct():
    source = AlphabetSort().examples(Split.TRAIN)
    for index in range(200):
        example = source.example(index)
        key = 0 if example.info["by"] == "first" else 1
        names = [name.split()[key] for part in example.info["rounds"] for name in part]
        assert len(set(names)) == len(names)
        assert names != sorted(names)


def test_ranges_the_wrong_way_round_are_refused():
    with pytest.raises(ConfigError) as refused:
        AlphabetSort.from_settings({"min_rounds": 5})
    assert all(fact in str(refused.value) for fact in ("min_rounds", "max_rounds", "5 and 3"))
