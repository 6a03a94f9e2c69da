"""The verdict on a run: what it claims follows from its evals, its steps, and how it ended."""

import math
import random
from dataclasses import replace

import pytest
from tests.core.diagnosis.test_rules import healthy, rising
from tests.core.reports.test_reports import an_eval

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.diagnosis import History, diagnose
from telescope_core.evals import Difference, write_result
from telescope_core.protocols import EnvironmentPlace
from telescope_core.records import RunFolder
from telescope_core.records.identity import RunState
from telescope_core.reports.before_after import from_first_to_last, trained_evals
from telescope_core.reports.differences import sentence
from telescope_core.reports.train_report import write_train_report
from telescope_core.reports.verdict import RunOutcome, run_verdict, verdict_of


def judged(rows, *changes, state=RunState.FINISHED, num_steps=None, ranges=None):
    history = History.of_rows(rows)
    findings, about = diagnose(history), {"state": state, "num_steps": num_steps}
    return verdict_of(history, findings, changes, **about, reward_ranges=ranges)


def an_eval_pair(name, before, after, *, tags=("before", "after"), seed=1):
    levels = zip(tags, (before, after), strict=True)
    return from_first_to_last({tag: an_eval(name, level, seed) for tag, level in levels})


def test_paired_evals_decide_and_say_by_how_much():
    """Whatever the reward of training did."""
    falling = healthy(60, **{"task_reward/mean": rising(0.5, 0.4, at=20)})
    up, down = an_eval_pair("sums", 0.2, 0.7), an_eval_pair("code", 0.7, 0.2)
    for changes, outcome in (
        ([up], RunOutcome.LEARNED),
        ([down], RunOutcome.WORSE),
        ([up, down], RunOutcome.MIXED),
        ([up, an_eval_pair("code", 0.5, 0.5)], RunOutcome.LEARNED),
        ([an_eval_pair("code", 0.5, 0.5)], RunOutcome.NOT_SHOWN),
    ):
        assert judged(falling, *changes).outcome is outcome, changes
    one = up.comparison.main
    text = judged(falling, up).text
    assert text == (
        f"Learned: held-out pass@1 rose from {one.before:.3f} to {one.after:.3f} on sums "
        f"({one.change:+.3f}, 95% interval {one.low:+.3f} to {one.high:+.3f}, 64 examples)."
    )
    assert (
        "No difference is shown on code (+0.000"
        in judged(falling, up, an_eval_pair("code", 0.5, 0.5)).text
    )


ENTRIES = {
    "environments": [{"name": "sums", "split": "eval"}, {"name": "acme/code"}],
    "evals": {
        "evals": [
            {"name": "sums"},
            {"name": "code", "split": "train"},
            {"name": "code@2", "split": "train", "separate_eval_samples": True},
            {"name": "code@3"},
        ]
    },
}


def test_evals_of_what_a_run_trains_on_are_known_by_split_and_environment():
    records = {
        name: EnvironmentRecord(id=f"acme/{name}", version="1", place=EnvironmentPlace.ELSEWHERE)
        for name in ("code", "code@2", "code@3")
    }
    assert trained_evals(ENTRIES, records) == ("sums", "code")
    assert trained_evals(ENTRIES, {}) == ("sums",)
    assert trained_evals({"evals": {}}, {}) == ()
    before = {"environments": [{"name": "a"}], "evals": {"evals": [{"name": "a"}]}}
    assert trained_evals(before, {}) == (), "of a version without the setting"


def test_what_a_run_trains_on_is_never_called_held_out(tmp_path):
    """Neither in the verdict nor in its report, whatever name workers elsewhere give it."""
    run = RunFolder.create(tmp_path / "run", config=ENTRIES)
    for row in healthy(20):
        run.log_metrics(row)
    for tag, level in (("before", 0.2), ("after", 0.7)):
        write_result(run.evals_path / f"sums-{tag}", an_eval("another name", level, 1))
    run.finish()
    text = run_verdict(run).text
    assert text.startswith("Learned: pass@1 rose from")
    assert "trains on the split that is played on another name: not held out" in text
    page = write_train_report(run).read_text()
    assert "Held-out" not in page
    assert "never trained on" not in page
    assert "Not held out" in page


def test_too_few_examples_say_how_many_would_do():
    change = an_eval_pair("sums", 0.5, 0.52)
    other = replace(change, moments=(change.moments[0], change.moments[1]._replace(tag="step-9")))
    noisy = an_eval("sums", 0.5, 2), an_eval("sums", 0.5, 3)
    unpaired = from_first_to_last({"before": noisy[0], "after": noisy[1]})
    verdict = judged(healthy(60), unpaired)
    assert verdict.outcome is RunOutcome.NOT_SHOWN
    needed = int(verdict.text.split(". ")[-1].split(" ")[0].replace(",", ""))
    one = unpaired.comparison.main
    assert needed == pytest.approx(64 * (one.detectable / 0.05) ** 2, rel=0.1)
    assert "(step 9)" in judged(healthy(60), other).text


def test_evals_of_other_code_decide_nothing():
    code = [
        EnvironmentRecord(id="a/b", version=v, place=EnvironmentPlace.SHARED, lock_digest=v)
        for v in ("1", "2")
    ]
    results = [an_eval("sums", level, 1) for level in (0.2, 0.7)]
    change = from_first_to_last(
        {
            tag: replace(result, environment_record=one)
            for tag, result, one in zip(("before", "after"), results, code, strict=True)
        }
    )
    verdict = judged(healthy(60), change)
    assert "training reward" in verdict.text
    assert "not comparable" in verdict.text


def test_without_evals_noise_is_seldom_called_a_trend():
    """The interval is one of 95 %, whatever the length of the run: 5 of 100 may miss."""
    num_wrong = {}
    for num_steps in (20, 60, 200):
        num_wrong[num_steps] = 0
        for seed in range(200):
            draw = random.Random(seed)
            rows = [
                {"step": at, "task_reward/mean": draw.gauss(0.3, 0.05)} for at in range(num_steps)
            ]
            outcome = judged(rows).outcome
            num_wrong[num_steps] += outcome in (RunOutcome.LEARNED, RunOutcome.WORSE)
    assert all(num <= 22 for num in num_wrong.values()), num_wrong
    assert sum(num_wrong.values()) <= 48, num_wrong


def test_the_reward_of_training_is_named_as_what_it_is():
    rows = healthy(100, **{"task_reward/mean": rising(0.2, 0.6, at=40)})
    verdict = judged(rows)
    assert verdict.outcome is RunOutcome.LEARNED
    assert "from 0.200 over the first 10 steps to 0.600 over the last 10" in verdict.text
    assert "no evals to compare" in verdict.text
    flat = judged(healthy(100, **{"task_reward/mean": 0.25}))
    assert flat.outcome is RunOutcome.NO_GAIN
    assert judged(healthy(5)).outcome is RunOutcome.TOO_EARLY
    assert judged([]).outcome is RunOutcome.TOO_EARLY


def test_a_gain_that_matters_is_one_of_the_declared_range():
    draw = random.Random(0)
    rows = healthy(60, **{"task_reward/mean": lambda _: draw.gauss(0.05, 0.01), "reward/max": 0.1})
    assert judged(rows).outcome is RunOutcome.NOT_SHOWN
    for ranges, outcome in (
        ({"sums": (0.0, 0.1)}, RunOutcome.NOT_SHOWN),
        ({"sums": (0.0, 1.0)}, RunOutcome.NO_GAIN),
        ({"sums": (0.0, 0.1), "code": (-1.0, 1.0)}, RunOutcome.NO_GAIN),
    ):
        assert judged(rows, ranges=ranges).outcome is outcome, ranges


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (1e-200, "rose from 2e-201 over the first 6 steps to 6e-201 over the last 6 (+4e-201,"),
        (1e-8, "rose from 2e-09 over the first 6 steps to 6e-09 over the last 6 (+4e-09,"),
        (1.0, "rose from 0.200 over the first 6 steps to 0.600 over the last 6 (+0.400,"),
        (1e199, "rose from 2e+198 over the first 6 steps to 6e+198 over the last 6 (+4e+198,"),
    ],
)
def test_rewards_of_any_size_are_judged_alike_and_told_in_a_few_digits(unit, expected):
    up = rising(0.2, 0.6, at=30)
    verdict = judged(healthy(60, **{"task_reward/mean": lambda step: unit * up(step)}))
    assert verdict.outcome is RunOutcome.LEARNED
    assert expected in verdict.text
    assert "inf" not in verdict.text
    assert len(verdict.text) < 300


def test_a_difference_of_any_size_is_told_in_a_few_digits():
    made = {"measure": "reward", "p": 0.2, "num_tasks": 9, "detectable": None}
    tiny = Difference(before=1e-8, after=3e-8, low=-1e-8, high=5e-8, **made)
    assert "from 1e-08 to 3e-08 (+2e-08, 95% interval -1e-08 to +5e-08, p" in sentence(tiny)
    endless = Difference(before=-1e300, after=1e300, low=-math.inf, high=math.inf, **made)
    assert "from -1e+300 to 1e+300 (+2e+300, no interval" in sentence(endless)
    solved = Difference(
        before=0.0, after=0.004, low=-0.001, high=0.009, **made | {"measure": "pass@1"}
    )
    assert "from 0.000 to 0.004 (+0.004, 95% interval -0.001 to +0.009, p" in sentence(solved)


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [
        ([0.0, 0.2, 0.35], RunOutcome.LEARNED),
        ([0.5, 0.52], RunOutcome.NO_GAIN),
        ([0.5, 0.2], RunOutcome.WORSE),
        ([0.5], RunOutcome.TOO_EARLY),
    ],
)
def test_supervised_training_is_judged_by_its_accuracy(measured, outcome):
    rows = [{"step": 10 * (at + 1), "accuracy": value} for at, value in enumerate(measured)]
    assert judged(rows).outcome is outcome


@pytest.mark.parametrize(
    ("num_steps", "text"),
    [(14, "none of 14 steps took an optimizer step"), (1, "the one step took no optimizer step")],
)
def test_a_run_without_an_optimizer_step_trained_nothing(num_steps, text):
    rows = healthy(num_steps, **{"loss/total": None})
    verdict = judged(rows, an_eval_pair("sums", 0.2, 0.2))
    assert verdict.outcome is RunOutcome.NOT_TRAINED
    assert text in verdict.text


def test_a_collapse_comes_before_what_evals_say():
    rows = healthy(60, **{"task_reward/mean": rising(0.4, 0.0, at=20)})
    verdict = judged(rows, an_eval_pair("sums", 0.7, 0.0))
    assert verdict.outcome is RunOutcome.COLLAPSED
    assert "held-out pass@1 fell" in verdict.text.lower()
    assert "since step" in verdict.text


def test_a_run_that_goes_on_says_so_and_when_it_ends():
    rows = [row | {"time_s": 1000.0 + 60.0 * row["step"]} for row in healthy(40)]
    running = judged(rows, an_eval_pair("sums", 0.2, 0.7), state=RunState.RUNNING, num_steps=70)
    assert running.text.startswith("Learned so far: ")
    assert running.text.endswith("About 30 minutes are left.")
    failed = judged(rows, state=RunState.FAILED, num_steps=70)
    assert failed.text.endswith("The run failed at step 40 of 70.")


def test_the_verdict_on_a_folder_is_that_on_what_it_holds(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={"run": {"number_of_steps": 50}})
    for row in healthy(40):
        run.log_metrics(row)
    for tag, level in (("before", 0.2), ("after", 0.7)):
        write_result(run.evals_path / f"sums-{tag}", an_eval("sums", level, 1))
    run.fail("a rank died")
    pair = an_eval_pair("sums", 0.2, 0.7)
    expected = judged(healthy(40), pair, state=RunState.FAILED, num_steps=50)
    assert run_verdict(run) == expected
    assert run_verdict(run, state=RunState.FINISHED).text != expected.text
