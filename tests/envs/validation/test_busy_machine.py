"""A verdict depends on the environment's own processor time, whatever else the machine does.

Time is simulated: an environment of a test says what its reward costs, in both kinds of time.
"""

import asyncio
import hashlib
import sys
import time

import pytest
from tests.envs.validation.test_reward_faults import Sums

from telescope_core import reward
from telescope_core.environments.loop_watch import Block
from telescope_core.probes.answers import Answers
from telescope_core.probes.meter import (
    Cut,
    Limits,
    Look,
    Meter,
    MeteredSpan,
    WaitClock,
    own_time_s,
)
from telescope_core.probes.reward import check_rewards
from telescope_envs.validation import Outcome, Verdict
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.processes import (
    late_ending,
    read_answers,
)
from telescope_envs.validation.records import (
    Level,
    verdict_of,
)


class Time:
    """What went by on a machine where each second of work takes `load` seconds."""

    def __init__(self, load: float) -> None:
        self.load = load
        self.spent_s = 0.0
        self.wall_s = 0.0

    def work(self, seconds: float) -> None:
        self.spent_s += seconds
        self.wall_s += seconds * self.load

    def meter(self) -> Meter:
        return Meter(spent_s=lambda: self.spent_s, wall_s=lambda: self.wall_s)


def results(tmp_path, environment_class, time: Time):
    """Return the outcome of each check of the level."""
    answers = Answers(tmp_path / "answers.jsonl")
    environment = environment_class()
    environment.time = time
    checking = check_rewards(environment, 3, answers, own_folder="", meter=time.meter())
    asyncio.run(checking)
    answers.close()
    findings = Findings()
    read_answers(tmp_path / "answers.jsonl").tell(findings)
    return {one.id: one for one in findings.results("") if one.level is Level.REWARD}


class Costs(Sums):
    """A clean environment whose scoring takes processor time."""

    each_s = 0.1
    huge_s = 0.1

    @reward
    def correct(self, rollout, example):
        is_huge = len(rollout.completion_text) > 1000
        self.time.work(self.huge_s if is_huge else self.each_s)
        return super().correct(rollout, example)


class IsSlowWhenHuge(Costs):
    huge_s = 25.0


class IsSlowAlways(Costs):
    each_s = huge_s = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("environment_class", [Costs, IsSlowWhenHuge, IsSlowAlways])
def test_the_same_environment_gets_the_same_outcomes_under_load(tmp_path, environment_class):
    idle, busy = (results(tmp_path, environment_class, Time(load)) for load in (1.0, 3.0))
    assert outcomes(busy) == outcomes(idle)


def outcomes(found):
    # Whether the loop was blocked is seen on the real clock, which is not simulated here.
    return {name: one.outcome for name, one in found.items() if name != "reward.loop"}


def test_a_rollout_that_computes_too_long_fails_with_what_it_spent(tmp_path):
    found = results(tmp_path, IsSlowWhenHuge, Time(1.0))["reward.huge"]
    assert found.outcome is Outcome.FAIL
    assert "the environment computed for 25.0 s" in found.evidence[0].text


@pytest.mark.slow
def test_too_few_rollouts_are_not_a_pass(tmp_path):
    found = results(tmp_path, IsSlowAlways, Time(1.0))
    assert found["reward.echo"].outcome is Outcome.INCONCLUSIVE
    assert "of 6 rollouts were tried" in found["reward.echo"].reason
    assert not [one for one in found.values() if one.outcome is Outcome.FAIL]


class Waits(Sums):
    """Waits for something that never comes, though it computes nothing."""

    async def compute_reward(self, rollout, example):
        self.time.wall_s += 500.0
        await asyncio.Event().wait()


def test_what_waits_for_ever_is_ended_and_not_conclusive(tmp_path):
    found = results(tmp_path, Waits, Time(1.0))
    assert found["reward.plays"].outcome is Outcome.INCONCLUSIVE
    assert "waited for something, or the machine was busy" in found["reward.plays"].reason
    assert {found[name].outcome for name in ("reward.gold", "reward.loop", "reward.deadline")} == {
        Outcome.INCONCLUSIVE
    }
    assert verdict_of(tuple(found.values()), asked=()) is Verdict.INCONCLUSIVE


def test_what_the_validator_costs_is_not_the_environments():
    meter = Meter(wall_s=lambda: 0.0)
    span = MeteredSpan(meter, Limits(own_s=10.0, wall_s=10.0))
    with meter.ours():
        for _ in range(200):
            hashlib.sha256(b"x" * 100_000).digest()
    ours_s = meter.spent_s() - meter.own_s()
    assert ours_s > 0
    assert span.own_s < meter.spent_s()


def test_a_span_says_which_limit_is_exceeded():
    time = Time(4.0)
    span = MeteredSpan(time.meter(), Limits(own_s=5.0, wall_s=10.0))
    assert span.cut is None
    time.work(3.0)
    assert span.cut is Cut.WALL
    time.work(3.0)
    assert span.cut is Cut.OWN


def test_a_probe_is_its_own_cause_only_if_it_computed():
    computed, waited = late_ending(100.0, 90.0), late_ending(100.0, 3.0)
    assert computed.is_own
    assert not waited.is_own
    assert "3.0 s of which it computed" in waited.text


def test_a_level_cut_short_is_not_conclusive_and_no_failure():
    findings = Findings()
    findings.passed("reward.plays")
    findings.cut_short("reward.gold", "not done after 9 s")
    found = {one.id: one for one in findings.results("") if one.level is Level.REWARD}
    assert found["reward.plays"].outcome is Outcome.PASS
    assert found["reward.gold"].outcome is Outcome.INCONCLUSIVE
    assert found["reward.deadline"].outcome is Outcome.INCONCLUSIVE
    assert not findings.has_failed(Level.REWARD)


def looks(*seen: tuple[float, float, str]) -> list[Look]:
    return [Look(at_s, spent_s, state) for at_s, spent_s, state in seen]


def test_a_thread_that_waits_for_a_processor_blocks_nothing_by_itself():
    waits = looks((0.0, 0.0, "R"), (0.01, 0.002, "R"), (0.02, 0.003, "R"), (0.2, 0.004, "R"))
    assert own_time_s(waits) == pytest.approx(0.004)


def test_a_thread_that_sleeps_or_computes_blocks_the_loop():
    sleeps = looks(*((0.01 * i, 0.0, "S") for i in range(11)))
    assert own_time_s(sleeps) == pytest.approx(0.1)
    computes = looks((0.0, 0.0, "R"), (0.01, 0.01, "R"), (0.1, 0.09, "R"))
    assert own_time_s(computes) == pytest.approx(0.09)


def test_what_went_on_while_nobody_looked_is_not_counted_as_sleep():
    assert own_time_s(looks((0.0, 0.0, "S"), (0.2, 0.001, "S"))) == pytest.approx(0.001)
    assert own_time_s([]) == 0.0


def test_on_macos_a_block_took_all_its_time_by_itself(monkeypatch, tmp_path):
    """There is neither a record of waits nor a clock of one thread for another."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    clock = WaitClock()
    monkeypatch.setattr(clock, "_path", tmp_path / "none")
    clock.start()
    assert clock.own_s(Block(duration_s=0.4, culprit="", stack="")) == 0.4
    clock.stop()
