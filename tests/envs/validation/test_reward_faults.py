"""Planted faults of the reward level, each in a small environment, and one that is clean."""

import asyncio
import itertools
import math
import random
import re
import time

import pytest

from telescope_core import (
    Example,
    ListSource,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    group_reward,
    reward,
)
from telescope_core.environments import runs_in
from telescope_envs.validation import Outcome

pytestmark = pytest.mark.slow


class Sums(SingleTurnEnvironment):
    """Adds two numbers; nothing is wrong with it."""

    sync_runs_in = "loop"

    def examples(self, split):
        first = 100 if split == "train" else 500
        pairs = [(first + 7 * i, 13 * i + 11) for i in range(12)]
        return ListSource(
            [
                Example(id=f"{a}+{b}", prompt=f"{a} + {b} = ? <answer></answer>", answer=str(a + b))
                for a, b in pairs
            ]
        )

    def gold_answer(self, example):
        return f"<answer>{example.answer}</answer>"

    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text[-100:].rpartition("<answer>")[2]
        return float(said == f"{example.answer}</answer>")


class PaysNothingSaid(Sums):
    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text
        return float(example.answer in said or not said.strip())


class PaysEcho(Sums):
    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text
        return float(str(example.prompt) in said or said == f"<answer>{example.answer}</answer>")


class PaysLength(Sums):
    @reward
    def correct(self, rollout, example):
        return float(
            len(rollout.completion_text) > 1000 or example.answer in rollout.completion_text
        )


class DropsWhatStandsBehind(Sums):
    """Takes letters and commands behind a number for its unit."""

    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text[-100:].rpartition("<answer>")[2].removesuffix("</answer>")
        return float(re.sub(r"[a-z\\ ]+$", "", said) == example.answer)


class PaysAPart(Sums):
    """Takes what stands somewhere in the right answer for it."""

    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text[-100:].rpartition("<answer>")[2].removesuffix("</answer>")
        return float(said != "" and said in example.answer)


class TakesLettersInAnyOrder(Sums):
    def examples(self, split):
        words = ["north", "harbor", "window", "garden", "silver", "market"]
        asked = [f"{split} word {at}? <answer></answer>" for at in range(len(words))]
        return ListSource(
            [Example(id=a, prompt=a, answer=w) for a, w in zip(asked, words, strict=True)]
        )

    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text[-100:].rpartition("<answer>")[2].removesuffix("</answer>")
        return float(sorted(said) == sorted(example.answer))


class PaysRefusals(Sums):
    """As a judge does that is fond of honesty."""

    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text
        return float("don't know" in said or said == f"<answer>{example.answer}</answer>")


class NotAllCanBeAnswered(PaysRefusals):
    """Refusing is right where the gold answer does."""

    def gold_answer(self, example):
        can_answer = example.id != "100+11"
        return f"<answer>{example.answer}</answer>" if can_answer else "I don't know."


class RemembersTheLast(Sums):
    """Pays a right answer only after a wrong one."""

    was_right = False

    @reward
    def correct(self, rollout, example):
        right = rollout.completion_text == f"<answer>{example.answer}</answer>"
        before, self.was_right = self.was_right, right
        return float(right and not before)


class PaysForm(Sums):
    @reward
    def correct(self, rollout, example):
        return float("<answer>" in rollout.completion_text)


class PaysAnyWords(Sums):
    @reward
    def correct(self, rollout, example):
        return float(bool(rollout.completion_text.strip()))


class PaysControlCharacters(Sums):
    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text
        return float("\x1b" in said or said == f"<answer>{example.answer}</answer>")


class PaysNan(Sums):
    @reward
    def correct(self, rollout, example):
        try:
            said = float(rollout.completion_text.partition(">")[2].partition("<")[0])
        except ValueError:
            return 0.0
        return float(not abs(said - float(example.answer)) > 1e-6)


class IsNoisy(Sums):
    @reward
    def correct(self, rollout, example):
        right = rollout.completion_text == f"<answer>{example.answer}</answer>"
        return 1.0 if right else random.random() * 0.01


class IsOutOfRange(Sums):
    @reward(weight=2.0)
    def correct(self, rollout, example):
        return float(rollout.completion_text == f"<answer>{example.answer}</answer>")


class IsNan(Sums):
    @reward
    def correct(self, rollout, example):
        right = rollout.completion_text == f"<answer>{example.answer}</answer>"
        return 1.0 if right else math.nan


class PaysGoldLess(Sums):
    @reward(weight=0.5)
    def correct(self, rollout, example):
        return float(rollout.completion_text == f"<answer>{example.answer}</answer>")


class RaisesOnJunk(Sums):
    @reward
    def correct(self, rollout, example):
        said = rollout.completion_text.partition("<answer>")[2]
        return float(int(said.removesuffix("</answer>")) == int(example.answer))


class RaisesNearTheRightAnswer(Sums):
    @reward
    def correct(self, rollout, example):
        if "\\pi" in rollout.completion_text:
            raise ValueError("pi is no digit")
        return Sums.correct(self, rollout, example)


class HasNoGold(Sums):
    def gold_answer(self, example):
        return None


class BlocksTheLoop(Sums):
    async def compute_reward(self, rollout, example):
        if rollout.completion_text == "" and example.id == "100+11":
            time.sleep(0.15)  # noqa: ASYNC251 - the fault
        return sum(rollout.rewards.values())


class SharesState(Sums):
    """Remembers the example on itself, where the next rollout overwrites it."""

    @runs_in("loop")
    def format_prompt(self, example):
        self.wanted = example.answer
        return str(example.prompt)

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == f"<answer>{self.wanted}</answer>")


class IgnoresCancelling(MultiTurnEnvironment):
    """Goes on for seconds after it was told to stop."""

    examples = Sums.examples
    gold_answer = Sums.gold_answer
    correct = Sums.correct

    async def play(self, episode):
        try:
            return await super().play(episode)
        except asyncio.CancelledError:
            for _ in itertools.repeat(None, 23):
                await asyncio.sleep(0.1)
            raise

    def env_response(self, messages, episode):
        return None


class RewardsOneOfTheGroup(Sums):
    @group_reward
    def best(self, rollouts):
        return [0.0]


class RewardsTheFirstPlace(Sums):
    reward_max = 2.0
    success_threshold = 1.0

    @group_reward
    def first(self, rollouts):
        return [float(place == 0 and len(rollouts) > 1) for place in range(len(rollouts))]


class ComparesItsGroup(Sums):
    """Takes from each rollout what the group earns in the mean; nothing is wrong with it."""

    reward_min = -1.0

    @group_reward
    def relative(self, rollouts):
        rewards = [sum(one.rewards.values()) for one in rollouts]
        return [0.0 * (one - sum(rewards) / len(rewards)) for one in rewards]


FAULTS = {
    RewardsOneOfTheGroup: ["reward.plays"],
    PaysNothingSaid: ["reward.floor", "reward.empty"],
    PaysEcho: ["reward.echo"],
    PaysLength: ["reward.huge", "reward.near_gold"],
    DropsWhatStandsBehind: ["reward.near_gold"],
    PaysAPart: ["reward.near_gold"],
    TakesLettersInAnyOrder: ["reward.near_gold"],
    PaysRefusals: ["reward.random_words"],
    RemembersTheLast: ["reward.deterministic"],
    PaysForm: ["reward.other_gold", "reward.special_values", "reward.format_only"],
    PaysAnyWords: ["reward.echo", "reward.other_gold", "reward.random_words", "reward.huge"],
    PaysControlCharacters: ["reward.unicode"],
    PaysNan: ["reward.special_values"],
    IsNoisy: ["reward.deterministic"],
    IsOutOfRange: ["reward.range"],
    IsNan: ["reward.range"],
    PaysGoldLess: ["reward.gold"],
    RaisesOnJunk: ["reward.plays"],
    HasNoGold: ["reward.has_gold"],
    BlocksTheLoop: ["reward.loop"],
    SharesState: ["reward.concurrency"],
    IgnoresCancelling: ["reward.deadline"],
}


def test_a_clean_environment_has_no_findings(try_out):
    tried = try_out("reward", Sums)
    assert tried.found == []
    outcomes = {name: check.outcome for name, check in tried.results.items() if "reward." in name}
    not_done = [name for name, outcome in outcomes.items() if outcome is not Outcome.PASS]
    assert not_done == ["reward.network"], "which takes a process"
    assert tried.facts["rollouts_per_second"] > 0
    assert tried.facts["reward_floor"] == 0


def test_where_a_gold_answer_refuses_refusals_are_not_tried(try_out):
    assert "reward.random_words" not in try_out("reward", NotAllCanBeAnswered).found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_is_found_by_its_check(try_out, fault):
    found = try_out("reward", fault).found
    wanted = FAULTS[fault]
    assert set(wanted) <= set(found)
    if len(wanted) == 1:
        assert found == wanted


class RaisesAlways(Sums):
    @reward
    def correct(self, rollout, example):
        raise ValueError("no judge")


def test_without_any_reward_nothing_passes_that_is_about_rewards(try_out):
    tried = try_out("reward", RaisesAlways)
    assert tried.found == ["reward.plays"]
    names = ("range", "floor", "near_gold", "deterministic", "concurrency", "loop", "deadline")
    outcomes = {name: tried.results[f"reward.{name}"].outcome for name in names}
    assert set(outcomes.values()) == {Outcome.NOT_RUN}, outcomes


def test_group_rewards_follow_their_rollouts_in_any_order(try_out):
    assert "reward.deterministic" in try_out("reward", RewardsTheFirstPlace).found
    assert try_out("reward", ComparesItsGroup).found == []


def test_answers_near_the_right_one_without_a_reward_show_nothing(try_out):
    tried = try_out("reward", RaisesNearTheRightAnswer)
    assert tried.found == ["reward.plays"]
    assert "pi is no digit" in tried.evidence("reward.plays").text
    near = tried.results["reward.near_gold"]
    assert near.outcome is Outcome.INCONCLUSIVE
    assert near.reason.startswith("only 0 of 6 answers with times pi have a reward; the first")
    assert "pi is no digit" in near.reason


def test_evidence_names_the_example_and_what_was_said(try_out):
    evidence = try_out("reward", PaysEcho).evidence("reward.echo")
    assert evidence.example_id == "100+11"
    assert evidence.completion.startswith("100 + 11")
    assert "this one earns 1" in evidence.text
