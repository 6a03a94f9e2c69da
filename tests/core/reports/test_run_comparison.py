"""Two made-up runs are compared: what differs, what is paired with what, and the verdict."""

import json
import random

import pytest
from tests.core.evals.test_comparison import an_eval

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.evals import EvalFolder
from telescope_core.protocols import EnvironmentPlace
from telescope_core.records import Resume, RolloutRow, RunFolder
from telescope_core.reports.run_comparison import Outcome, compare_runs
from telescope_core.types import RolloutStatus

CONFIG = {
    "run": {"name": "a", "output_dir": "runs", "number_of_steps": 4},
    "trainer": {"learning_rate": 1e-3},
    "algorithm": {"use_tis": False},
    "environments": [{"name": "sums", "env": {"level": "digit"}}],
    "inference": {"inference_base_port": 8100},
}
GIVEN = ["run.name", "trainer.learning_rate", "inference.inference_base_port"]


def a_run(folder, rewards_by_step=(), evals=(), *, config=CONFIG, given=GIVEN) -> RunFolder:
    """A run with these rewards, as {example: rewards} for each step, and evals by folder."""
    run = RunFolder.create(folder, config=config, name=folder.name)
    run.note_settings(given, [], {})
    run.note_reward_ranges({"sums": (0.0, 1.0)})
    for step, by_example in enumerate(rewards_by_step, 1):
        run.log_metrics({"step": step})
        rows = [
            a_row(step, name, at, one)
            for name, found in by_example.items()
            for at, one in enumerate(found)
        ]
        run.write_rollouts(step, rows)
    for name, rewards in dict(evals).items():
        EvalFolder.create(run.evals_path / name, manifest={}).finish(an_eval(rewards))
    run.finish()
    return run


def a_row(step: int, example_id: str, index: int, reward: float | None) -> RolloutRow:
    return RolloutRow(
        step=step,
        environment="sums",
        example_id=example_id,
        group_id=f"{step}-{example_id}",
        index=index,
        status=RolloutStatus.FAILED if reward is None else RolloutStatus.KEPT,
        reward=reward,
    )


def solved(chance: float, num: int = 60, *, seed: int = 0):
    draw = random.Random(seed)
    return [(f"e{n}", [float(draw.random() < chance) for _ in range(4)]) for n in range(num)]


def test_settings_that_differ_leave_out_names_folders_and_ports(tmp_path):
    other = json.loads(json.dumps(CONFIG))
    other["run"] |= {"name": "b", "output_dir": "elsewhere"}
    other["inference"]["inference_base_port"] = 9000
    other["trainer"]["learning_rate"] = 1e-4
    other["algorithm"]["use_tis"] = True
    found = compare_runs(a_run(tmp_path / "a"), a_run(tmp_path / "b", config=other))
    assert {one.name: one.values for one in found.settings} == {
        "trainer.learning_rate": {"before": 1e-3, "after": 1e-4},
        "algorithm.use_tis": {"before": False, "after": True},
    }
    assert found.following == {"algorithm.use_tis"}
    assert (found.outcome, found.evals, found.training) == (Outcome.UNKNOWN, (), ())


def test_a_setting_of_one_version_at_its_default_is_no_difference(tmp_path):
    old = {**CONFIG, "trainer": {**CONFIG["trainer"], "gone": 1, "used": 2}}
    before, after = a_run(tmp_path / "a", config=old), a_run(tmp_path / "b")
    before.note_settings(GIVEN, [], {"trainer.gone": 1, "trainer.used": 1})
    found = compare_runs(before, after)
    assert {one.name: one.values for one in found.settings} == {"trainer.used": {"before": 2}}
    assert found.following == {"trainer.used"}


def test_files_that_an_earlier_version_did_not_record_are_no_difference(tmp_path):
    before, after, other = (a_run(tmp_path / name) for name in "abc")
    after.note_inputs({"model.model: config.json": "1" * 64})
    assert compare_runs(before, after).code == ()
    other.note_inputs({"model.model: config.json": "2" * 64})
    (line,) = compare_runs(after, other).code
    assert line == f"file model.model: config.json: {'1' * 12} -> {'2' * 12}"


def test_rewards_are_paired_by_step_over_the_examples_of_both(tmp_path):
    before = [{"x": [0.0, 1.0], "y": [0.0]}, {"x": [0.5], "z": [1.0]}, {"w": [1.0]}, {"x": [0.25]}]
    after = [{"x": [1.0], "y": [0.5]}, {"x": [0.5, 1.0, None]}, {"v": [0.0]}]
    found = compare_runs(a_run(tmp_path / "a", before), a_run(tmp_path / "b", after))
    (pair,) = found.training
    # Step 1: x from 0.5 to 1, y from 0 to 0.5; step 2: x from 0.5 to 0.75.
    assert (pair.difference.before, pair.difference.after) == (
        pytest.approx((0.25 + 0.5) / 2),
        pytest.approx((0.75 + 0.75) / 2),
    )
    assert (pair.first_step, pair.last_step, pair.difference.num_tasks) == (1, 2, 2)
    assert (pair.num_examples, pair.num_only_one) == (3, 3)
    assert any("3 examples of training were played by one run alone" in one for one in found.notes)
    assert any("a took 4 steps and b 3" in one for one in found.notes)


@pytest.mark.parametrize(
    ("chances", "outcome"),
    [((0.2, 0.8), Outcome.BETTER), ((0.8, 0.2), Outcome.WORSE), ((0.5, 0.5), Outcome.NOT_SHOWN)],
)
def test_the_last_eval_of_both_decides_before_the_reward_of_training(tmp_path, chances, outcome):
    evals = [
        {
            "sums-before": solved(0.9 - 0.8 * side, seed=7),
            "sums-step-2": solved(0.9 - 0.8 * side, seed=8),
            "sums-after": solved(chance, seed=side),
        }
        for side, chance in enumerate(chances)
    ]
    steps = [[{"x": [1.0 - side]}] * 4 for side in (0, 1)]
    a, b = (
        a_run(tmp_path / name, of_steps, of_evals)
        for name, of_steps, of_evals in zip("ab", steps, evals, strict=True)
    )
    found = compare_runs(a, b)
    assert [(one.name, one.step) for one in found.evals] == [("sums", 0), ("sums", 2), ("sums", 4)]
    assert found.outcome is outcome
    assert "sums after step 4: pass@1" in found.verdict
    assert "training" not in found.verdict
    is_shown = outcome is not Outcome.NOT_SHOWN
    for fact in ("Each run ran once", "chance alone"):
        assert (fact in " ".join(found.notes)) == is_shown


def test_evals_are_paired_by_the_steps_that_the_weights_took(tmp_path):
    """The end of a shorter run is in the middle of a longer one."""
    a = a_run(tmp_path / "a", [{"x": [1.0]}] * 2, {"sums-after": solved(0.3)})
    b = a_run(
        tmp_path / "b",
        [{"x": [1.0]}] * 4,
        {"sums-step-2": solved(0.3), "sums-after": solved(0.9)},
    )
    found = compare_runs(a, b)
    assert [one.step for one in found.evals] == [2]
    assert "b scored the same as a" in found.verdict


def test_changes_that_cancel_are_not_called_the_same(tmp_path):
    a = a_run(tmp_path / "a", [{"x": [0.5]}, {"x": [0.5]}], {})
    b = a_run(tmp_path / "b", [{"x": [1.0]}, {"x": [0.0]}], {})
    found = compare_runs(a, b)
    assert "No difference is shown between a and b" in found.verdict
    assert "too few steps to find even the largest difference" in found.verdict


def test_without_evals_the_reward_of_training_decides_and_says_so(tmp_path):
    draw = random.Random(0)
    a, b = (
        a_run(tmp_path / name, [{"x": [level + draw.random() / 10]} for _ in range(8)])
        for name, level in (("a", 0.2), ("b", 0.6))
    )
    found = compare_runs(a, b)
    assert found.outcome is Outcome.BETTER
    assert found.verdict.startswith("b is better than a: training on sums: reward rose from 0.2")
    assert "paired over 8 steps" in found.verdict
    assert "No eval decides this" in found.verdict


def test_evals_without_an_example_in_both_are_told_and_decide_nothing(tmp_path):
    other = [(f"other-{name}", rewards) for name, rewards in solved(0.9)]
    a = a_run(tmp_path / "a", [{"x": [1.0]}], {"sums-after": solved(0.3)})
    b = a_run(tmp_path / "b", [{"x": [1.0]}], {"sums-after": other})
    found = compare_runs(a, b)
    assert found.evals == ()
    assert any("expected two evals with examples in common" in note for note in found.notes)


def test_other_code_is_told_and_its_evals_decide_nothing(tmp_path):
    runs = []
    for number, name in enumerate("ab"):
        run = a_run(tmp_path / name, [{"x": [1.0]}] * 3)
        record = EnvironmentRecord(
            id="sums", version=f"{number}", place=EnvironmentPlace.IMPORTABLE
        )
        run.note_environments({"sums": record})
        run.note_inputs({"model.model: config.json": f"{number}" * 64})
        result = an_eval(solved(0.2 + 0.6 * number), environment_record=record)
        EvalFolder.create(run.evals_path / "sums-after", manifest={}).finish(result)
        runs.append(run)
    found = compare_runs(*runs)
    assert "environment sums: version: 0 -> 1" in found.code
    assert any(line.startswith("file model.model: config.json: 000") for line in found.code)
    assert len(found.evals) == 1
    assert found.outcome is Outcome.NOT_SHOWN
    assert "No eval decides this" in found.verdict
    assert sum("version: 0 -> 1" in one for one in (*found.notes, *found.code)) == 1


def test_two_runs_of_one_name_go_by_their_paths(tmp_path):
    runs = [a_run(tmp_path / place / "a", [{"x": [1.0]}] * 2) for place in ("one", "two")]
    verdict = compare_runs(*runs).verdict
    assert all(str(run.path) in verdict for run in runs)


def test_a_fork_names_its_step_and_changes_of_the_run_itself_are_told(tmp_path):
    a, b = (a_run(tmp_path / name, [{"x": [1.0]}]) for name in "ab")
    changed = ("trainer.learning_rate: 0.001 -> 0.0001",)
    b.note_resume(Resume(at="", step=2, checkpoint="c", run=str(a.path), changed=changed))
    found = compare_runs(a, b)
    assert (found.fork.step, found.fork.changed) == (2, changed)
    assert not any("itself went on" in note for note in found.notes)
    assert compare_runs(b, a).fork is None
    a.note_resume(Resume(at="", step=3, checkpoint="c", changed=changed))
    assert any("a itself went on from step 3" in one for one in compare_runs(a, b).notes)
