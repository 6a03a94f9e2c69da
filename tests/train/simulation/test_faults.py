"""Runs in which things go wrong keep every invariant, and a broken invariant is noticed."""

import pytest

from telescope_train.rollouts.lanes import Lanes
from telescope_train.rollouts.places import Place
from telescope_train.rollouts.playing import Player
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.rollouts.sampler import RolloutSampler
from telescope_train.rollouts.stages import AttemptLife
from telescope_train.simulation.faults import KINDS, play, schedule

FEW = 6
MANY = 50


def problems(kind: str, numbers: range) -> dict[str, list[str]]:
    found = {f"{kind}/{number}": play(schedule(kind, number)) for number in numbers}
    return {name: what for name, what in found.items() if what}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_goes_wrong_every_invariant_holds(kind: str) -> None:
    assert problems(kind, range(FEW)) == {}, "scripts/simulate_faults.py --replay plays one again"


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_in_many_schedules(kind: str) -> None:
    assert problems(kind, range(FEW, MANY)) == {}, "scripts/simulate_faults.py --replay plays one"


@pytest.mark.parametrize(
    "name", ["ranks-die/212", "driver-killed/332", "several-at-once/62", "several-at-once/414"]
)
def test_what_was_wrong_once_is_right(name: str) -> None:
    kind, _, number = name.rpartition("/")
    assert play(schedule(kind, int(number))) == []


def test_events_of_what_is_played_again_that_stay_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A group that had ended at the checkpoint, and was too old when a later step chose it.
    monkeypatch.setattr(SamplerState, "repeated", lambda state: lambda event: False)
    assert any("has the life" in what for what in play(schedule("ranks-die", 212)))


def test_there_are_twenty_kinds() -> None:
    assert len(KINDS) >= 20


def wrong(kind: str) -> str:
    """What is found in some schedules of a kind, as text; a crash counts."""
    texts: list[str] = []
    for number in range(12):
        try:
            texts += play(schedule(kind, number))
        except (AssertionError, KeyError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return "\n".join(texts)


def test_a_lane_that_is_not_given_back_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "leave", lambda self: None)
    assert "every task waits" in wrong("one-lane")


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
    assert wrong("driver-killed")


def test_tokens_that_are_too_old_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Player, "drop_older_than", lambda self, version: None)
    monkeypatch.setattr(RolloutSampler, "_is_too_old", lambda self, group: False)
    assert "updates old" in wrong("finished-order")


def test_an_attempt_that_leaves_no_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Place) -> None:
        self.ended = [one for one in self.ended if one.group_id != self.group.id]

    monkeypatch.setattr(Place, "give_up", forget)
    assert "has the life" in wrong("finished-order"), "another attempt takes its number"


def test_an_attempt_whose_end_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttemptLife, "is_cancelled", lambda self, reason: None)
    assert "has the life" in wrong("finished-order")


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
    assert "failed and has the reward 1.0" in wrong("environment-raises")


def test_equal_names_are_equal_runs() -> None:
    first, again = (schedule("several-at-once", 3) for _ in range(2))
    assert first.scenario.config == again.scenario.config
    assert first.kills_s == again.kills_s
