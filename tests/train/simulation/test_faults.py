"""Runs in which things go wrong keep every invariant, and a broken invariant is noticed."""

import re

import pytest
from tests.simulation.schedules import KINDS, Ledger, play, played, schedule

from telescope_train.rollouts.attempts import AttemptStages
from telescope_train.rollouts.order import PendingGroup
from telescope_train.rollouts.playing import Player
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.rollouts.sampler import RolloutSampler
from telescope_train.rollouts.slots import Slots
from telescope_train.simulation.virtual_time import Deadlock

FEW = 1
SOME = 2
MANY = 50


def problems(kind: str, numbers: range) -> dict[str, list[str]]:
    found = {f"{kind}/{number}": play(schedule(kind, number)) for number in numbers}
    return {name: what for name, what in found.items() if what}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(one, marks=pytest.mark.slow if re.search("slow|while-saving", one) else [])
        for one in KINDS
    ],
)
def test_whatever_goes_wrong_every_invariant_holds(kind: str) -> None:
    assert problems(kind, range(FEW)) == {}, "scripts/simulate_faults.py --replay plays one again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_in_some_schedules(kind: str) -> None:
    assert problems(kind, range(FEW, SOME)) == {}, "scripts/simulate_faults.py --replay plays one"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_in_many_schedules(kind: str) -> None:
    assert problems(kind, range(SOME, MANY)) == {}, "scripts/simulate_faults.py --replay plays one"


@pytest.mark.parametrize(
    "name",
    [
        "ranks-die/212",
        "driver-killed/332",
        "several-at-once/62",
        pytest.param("several-at-once/414", marks=pytest.mark.slow),
    ],
)
def test_what_was_wrong_once_is_right(name: str) -> None:
    kind, _, number = name.rpartition("/")
    assert play(schedule(kind, int(number))) == []


def test_events_of_what_is_played_again_that_stay_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A group that had ended at the checkpoint, and was too old when a later step chose it.
    monkeypatch.setattr(SamplerState, "repeated", lambda state: lambda event: False)
    assert first_with("has the stages", "ranks-die", range(212, 213)) == 212


def test_there_are_twenty_kinds() -> None:
    assert len(KINDS) >= 20


def first_with(problem: str, kind: str, numbers: range = range(12)) -> int | None:
    """Return the first schedule of a kind in which `problem` is found; a crash counts as one."""
    for number in numbers:
        try:
            found = play(schedule(kind, number))
        except (AssertionError, KeyError, ValueError) as error:
            found = [f"{type(error).__name__}: {error}"]
        if any(problem in one for one in found):
            return number
    return None


def test_a_slot_that_is_not_given_back_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "leave", lambda self: None)
    with pytest.raises(Deadlock):
        played(schedule("one-slot", 0), Ledger())


def test_a_checkpoint_that_skips_a_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = RolloutSampler.settled

    async def skipping(self: RolloutSampler, version: int) -> SamplerState:
        state = await settled(self, version)
        return SamplerState(
            next_batch=state.next_batch + 1,
            draw_position=state.draw_position,
            batches=state.batches,
            open_places=state.open_places,
        )

    monkeypatch.setattr(RolloutSampler, "settled", skipping)
    assert first_with("", "driver-killed") is not None


@pytest.mark.slow
def test_tokens_that_are_too_old_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Player, "drop_older_than", lambda self, version: None)
    monkeypatch.setattr(RolloutSampler, "_is_too_old", lambda self, group: False)
    assert first_with("old", "finished-order") is not None


@pytest.mark.slow
def test_an_attempt_that_leaves_no_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: PendingGroup) -> None:
        self.ended = [one for one in self.ended if one.group_id != self.group.id]

    monkeypatch.setattr(PendingGroup, "give_up", forget)
    # Another attempt takes its number, which then ends twice.
    assert first_with("has the stages", "finished-order") is not None


def test_an_attempt_whose_end_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttemptStages, "is_cancelled", lambda self, reason: None)
    assert first_with("has the stages", "finished-order") is not None


def test_a_failure_that_counts_as_a_reward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from telescope_train.simulation import environments

    failed = environments._failed
    monkeypatch.setattr(
        environments,
        "_failed",
        lambda rollout, error, reason: failed(
            environments.replace(rollout, reward=1.0), error, reason
        ),
    )
    assert first_with("reward 1.0", "environment-raises") is not None


def test_equal_names_are_equal_runs() -> None:
    first, again = (schedule("several-at-once", 3) for _ in range(2))
    assert first.scenario.config == again.scenario.config
    assert first.kills_s == again.kills_s
