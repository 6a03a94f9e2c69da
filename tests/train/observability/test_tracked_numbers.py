"""What trackers get: rollouts of all environments, meters of all sources, evals with intervals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from telescope_core.evals.result import result_of
from telescope_core.evals.settings import EvalSettings
from telescope_core.evals.stats import Estimate
from telescope_core.records import RolloutRow, RunFolder, row_of
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.timeline import GaugeSample
from telescope_core.types import EnvironmentDescription, Rollout, Sampling
from telescope_train.observability.prometheus import PrometheusEndpoint
from telescope_train.observability.recording import RecordingSettings, recording
from telescope_train.observability.trackers.tracker import TrackedRun
from telescope_train.observability.trackers.tracking import (
    MOST_SOURCES,
    Second,
    SecondMeters,
    StepMeters,
    spread,
)


def row_in(environment: str, group: int, index: int) -> RolloutRow:
    rollout = Rollout(
        environment=environment,
        example_id="e",
        group_id=f"0.{group}",
        index=index,
        messages=(),
        reward=0.5,
    )
    return row_of(rollout, step=1)


def test_samples_are_of_all_environments_and_of_different_groups():
    rows = [row_in("maze", group, index) for group in range(6) for index in range(8)]
    rows += [row_in("sums", 9, index) for index in range(3)]
    found = [(row.environment, row.group_id, row.index) for row in spread(rows, 8)]
    assert found == [
        ("maze", "0.0", 0),
        ("sums", "0.9", 0),
        ("maze", "0.1", 0),
        ("sums", "0.9", 1),
        ("maze", "0.2", 0),
        ("sums", "0.9", 2),
        ("maze", "0.3", 0),
        ("maze", "0.4", 0),
    ]
    assert [row.index for row in spread(rows[:8], 20)] == list(range(8))
    assert spread([], 8) == []


def test_meters_of_many_sources_are_told_over_all_of_them():
    meters = StepMeters()
    for number in range(MOST_SOURCES + 1):
        for name in ("gpu/used_share", "vllm/requests_running"):
            meters.add(
                GaugeSample(time_s=0.0, source=f"gpu {number}", name=name, value=float(number))
            )
    assert meters.take() == {
        "meter/gpu/used_share/mean": MOST_SOURCES / 2,
        "meter/gpu/used_share/max": MOST_SOURCES,
        "meter/vllm/requests_running/sum": MOST_SOURCES * (MOST_SOURCES + 1) / 2,
    }
    assert meters.take() == {}


def test_meters_are_told_second_by_second():
    seconds, told = SecondMeters(), list[Second | None]()
    for time_s, value in ((9.1, 1.0), (9.9, 3.0), (10.0, 5.0), (9.8, 7.0), (12.5, 9.0)):
        told.append(
            seconds.add(GaugeSample(time_s=time_s, source="a", name="cpu/load", value=value))
        )
    whole = [one for one in told if one is not None]
    assert [(one.time_s, one.numbers["gauge/cpu/load/a"]) for one in whole] == [(9, 2), (10, 6)]
    last = seconds.take()
    assert last == (12, dict.fromkeys((f"gauge/cpu/load/{of}" for of in ("mean", "max", "a")), 9.0))
    assert seconds.take() is None


class Remembering:
    """A tracker that keeps all numbers."""

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, float]]] = []

    def begin(self, run: TrackedRun) -> None:
        """Begin."""

    def log_metrics(self, step: int, row: Any) -> None:
        self.found.append((step, dict(row)))

    def log_gauges(self, time_s: int, row: Any) -> None:
        """Take gauges."""

    def log_rollouts(self, step: int, rows: Any) -> None:
        """Take rollouts."""

    def log_files(self, paths: Any) -> None:
        """Take files."""

    def end(self, state: str) -> None:
        """End."""


@pytest.mark.slow
async def test_evals_are_told_with_their_intervals(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "demo", config={}).path
    run = TrackedRun(name="demo", folder=folder, config={}, first_step=1, options={})
    rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    rows = [
        row_of(
            Rollout(
                environment="maze",
                example_id=str(example),
                group_id=f"e{example}",
                index=index,
                messages=(),
                reward=reward,
            ),
            step=4,
        )
        for example, of_example in enumerate(rewards)
        for index, reward in enumerate(of_example)
    ]
    result = result_of(
        rows,
        EvalSettings(num_examples=3, rollouts=2, ks=(1, 2), sampling=Sampling(max_tokens=8)),
        EnvironmentDescription(
            name="maze",
            version="1",
            reward_min=0.0,
            reward_max=1.0,
            success_threshold=1.0,
            num_examples={},
            network="none",
        ),
        model="tiny",
        duration_s=1.0,
    )
    vote = Estimate(mean=0.25, low=0.1, high=0.5, num_tasks=3)
    result = replace(result, majority_at={3: vote})
    point = EvalPoint(time_s=1.0, name="hard", tag="step-4", version=4, state=EvalPointState.DONE)
    tracker = Remembering()
    settings = RecordingSettings(
        folder=run.folder,
        run="demo",
        model="tiny",
        trackers={"one": tracker},
        tracked=run,
        prometheus=PrometheusEndpoint("127.0.0.1", 0, environments=["hard"]),
    )
    async with recording(settings, run.folder / "events", warn=print) as opened:
        opened.evaluated(point, result)
        families = {family.name: family for family in opened.shown.collect()}
    ((step, numbers),) = tracker.found
    assert step == 4
    solved, any_of_two = result.pass_at[1], result.pass_at[2]
    assert numbers == {
        "eval/hard/version": 4.0,
        "eval/hard/lag_steps": 0.0,
        "eval/hard/scored": 6.0,
        "eval/hard/failed": 0.0,
        "eval/hard/reward": 0.5,
        "eval/hard/reward/low": result.reward.low,
        "eval/hard/reward/high": result.reward.high,
        "eval/hard/pass@1": 0.5,
        "eval/hard/pass@1/low": solved.low,
        "eval/hard/pass@1/high": solved.high,
        "eval/hard/pass@2": pytest.approx(2 / 3),
        "eval/hard/pass@2/low": any_of_two.low,
        "eval/hard/pass@2/high": any_of_two.high,
        "eval/hard/maj@3": 0.25,
        "eval/hard/maj@3/low": 0.1,
        "eval/hard/maj@3/high": 0.5,
    }
    (sample,) = families["telescope_eval_pass_1_high"].samples
    assert (sample.labels, sample.value) == ({"eval": "hard"}, solved.high)
