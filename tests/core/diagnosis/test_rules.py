"""Each rule on a run that has its fault, and all of them on runs that have none."""

import math
import random
import re
from pathlib import Path

import pytest

from telescope_core.diagnosis import RULES, GrowingHistory, History, Kind, diagnose
from telescope_core.diagnosis import rules as rules_module

ROOT = Path(__file__).parents[3]
RULES_MODULE = rules_module.__name__


def healthy(num_steps, seed=0, **changes):
    """Return rows like those of the quickstart: noise around a reward that rises slowly.

    `changes`: metric -> function of the step, or a value; None takes the metric away.
    """
    draw = random.Random(seed)
    rows = []
    for step in range(1, num_steps + 1):
        reward = 0.3 + 0.2 * step / num_steps + draw.gauss(0, 0.05)
        row = {
            "step": step,
            "task_reward/mean": reward,
            "task_reward/math/mean": reward + draw.gauss(0, 0.03),
            "task_reward/code/mean": reward + draw.gauss(0, 0.03),
            "reward/math/correct": reward,
            "reward/math/form": 0.6 + draw.gauss(0, 0.05),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "groups/total": 16.0,
            "groups/discarded": float(draw.randint(0, 5)),
            "groups/all_at_minimum": 1.0,
            "groups/all_at_maximum": 0.0,
            "groups/all_equal": 0.0,
            "rollouts/total": 256.0,
            "rollouts/failed_attempts": float(draw.randint(0, 2)),
            "failures/endpoint": 0.0,
            "loss/total": draw.gauss(0, 0.1),
            "optimizer/skipped": 0.0,
            "entropy": 0.5 - 0.2 * step / num_steps + draw.gauss(0, 0.02),
            "completion_len/mean": 5.0 + draw.gauss(0, 0.4),
            "truncated/fraction": abs(draw.gauss(0, 0.02)),
            "mismatch/mean": abs(draw.gauss(1e-6, 1e-6)),
            "grad_norm": 2.0 + draw.gauss(0, 0.4),
            "effective_sample_size": 0.99,
            "staleness/mean": 0.9,
            "staleness/undelivered": 0.0,
            "optimizer/kept_gradients": 0.0,
            "optimizer/steps": 1.0,
            "weights/unchanged": 0.0,
            "advantage/reward_correlation": 0.9 + draw.gauss(0, 0.02),
            "reward/length_order": draw.gauss(-0.2, 0.1),
            "reward/noise": 0.0,
            "answers/most_common": abs(draw.gauss(0.1, 0.03)),
            "answers/looping": abs(draw.gauss(0, 0.02)),
            "groups/repeated": float(draw.randint(0, 2)),
            "signal/math/groups": 0.5,
            "signal/math/share": min(1.0, max(0.0, draw.gauss(0.6, 0.1))),
            "signal/code/groups": 0.5,
            "signal/code/share": min(1.0, max(0.0, draw.gauss(0.4, 0.1))),
            "time/score_s": 0.01,
            "time/batch_s": 2.5,
            "time/step_s": 3.0,
            "time/generate_s": 1.0,
            "time/train_s": 1.8,
            "time/sync_s": 0.1,
            "time/wait_s": 0.1,
            "pack/fill": 0.3,
            "pack/batches": 1.0,
        }
        for metric, value in changes.items():
            found = value(step) if callable(value) else value
            if found is None:
                row.pop(metric, None)
            else:
                row[metric] = found
        rows.append(row)
    return rows


@pytest.fixture(autouse=True)
def rules_that_failed(caplog):
    """Return no rules; those that a test does not take out of it must be none at its end."""
    expected = []
    yield expected
    failed = [one.args[0] for one in caplog.get_records("call") if one.name == RULES_MODULE]
    assert failed == expected


def found_in(rows):
    return diagnose(History.of_rows(rows))


def test_the_range_that_clips_is_that_of_the_run():
    [one] = found_in(healthy(10, **PLANTED["rewards clipped"]))
    assert "range that an [[environments]] entry of the run gives" in one.text


def rising(before, after, at=50):
    """Return a value that changes within ten steps."""
    return lambda step: before + (after - before) * min(1.0, max(0.0, (step - at) / 10))


PLANTED = {
    "nothing trained": {"loss/total": None},
    "one reward": {"reward/min": 0.0, "reward/max": 0.0},
    "no signal": {"groups/discarded": 16.0, "groups/all_at_minimum": 15.0},
    "skipped gradients": {"optimizer/skipped": lambda step: float(step > 40)},
    "advantages upside down": {"advantage/reward_correlation": -0.97},
    "weights stand still": {"weights/unchanged": lambda step: float(step > 30)},
    "weights do not arrive": {"staleness/undelivered": 1.0},
    "gradients kept": {"optimizer/kept_gradients": 1.0},
    "another model": {"mismatch/mean": 0.4},
    "failures": {"rollouts/failed_attempts": 200.0, "failures/endpoint": 200.0},
    "collapse": {"task_reward/mean": rising(0.4, 0.0), "task_reward/math/mean": rising(0.4, 0.0)},
    "rewards clipped": {"rewards/outside_range": 3.0},
    "length decides": {"reward/length_order": -0.95},
    "lottery": {"reward/noise": 0.9},
    "one answer": {"answers/most_common": rising(0.2, 1.0)},
    "loops": {"answers/looping": rising(0.0, 0.6)},
    "repeated examples": {"groups/repeated": 12.0},
    "eval leak": {"groups/held_out": 2.0},
    "one drowns others": {
        "signal/math/groups": 0.5,
        "signal/math/share": 0.99,
        "signal/code/groups": 0.5,
        "signal/code/share": 0.01,
    },
    "failing tools": {
        "reward/math/tool_calls": 1.5,
        "reward/math/tool_errors/raised": 1.0,
        "reward/math/tool_errors/timed_out": 0.2,
    },
    "frozen weights": {"weights/unchanged": 0.3},
    "rounded away": {"optimizer/changed_weights": 0.04},
    "does not move": {"effective_sample_size": 1.0 - 1e-9},
    "mismatch grows": {"mismatch/mean": rising(0.005, 0.05)},
    "entropy gone": {"entropy": rising(0.5, 0.001)},
    "entropy explodes": {"entropy": rising(0.4, 2.4)},
    "truncation": {"truncated/fraction": rising(0.0, 1.0)},
    "some answers cut": {"truncated/fraction": 0.15},
    "out of context": {"rollouts/out_of_context": 100.0},
    "deadlines": {"rollouts/timed_out": 60.0},
    "length grows": {"completion_len/mean": rising(5.0, 20.0), "task_reward/mean": 0.3},
    "length shrinks": {"completion_len/mean": rising(40.0, 2.0), "task_reward/mean": 0.3},
    "form over task": {
        "reward/math/form": rising(0.4, 0.9),
        "reward/math/correct": rising(0.5, 0.2),
    },
    "too old": {"rollouts/off_policy": 100.0},
    "few samples count": {"effective_sample_size": 0.1},
    "ratio off one": {"importance_weight/mean": 1.2, "staleness/mean": 0.0},
    "clipping": {"clip_fraction/low": 0.4, "clip_fraction/high": 0.5},
    "corrected away": {"tis/masked_fraction": 0.5},
    "filtered": {"filtered/repetition": 200.0},
    "gradient grows": {"grad_norm": rising(2.0, 200.0)},
    "far from reference": {"kl/reference": rising(0.5, 3.0)},
    "short first": {"length_bias": 0.5},
    "evals fall": {
        "eval/math/reward/low": rising(0.4, 0.1),
        "eval/math/reward/high": rising(0.5, 0.2),
    },
    "evals missing": {"eval/missing": lambda step: float(step == 30)},
    "branched turns": {"turns/branched": 0.25},
    "waits for rollouts": {"time/generate_s": 8.0, "time/step_s": 10.0},
    "slow rewards": {
        "time/generate_s": 8.0,
        "time/step_s": 10.0,
        "time/batch_s": 9.0,
        "time/score_s": 7.0,
    },
    "servers idle": {"time/generate_s": 0.1, "time/step_s": 10.0, "time/batch_s": 1.0},
    "lost servers": {"servers/lost": lambda step: float(step > 90)},
    "full caches": {
        "servers/thrown_out": lambda step: 10.0 * (step > 60),
        "time/generate_s": 8.0,
        "time/step_s": 10.0,
    },
    "slow weights": {"time/sync_s": 2.0, "time/step_s": 5.0},
    "slow driver": {"time/wait_s": 2.0, "time/step_s": 5.0},
    "empty rows": {"pack/fill": 0.2, "pack/batches": 8.0},
    "uneven ranks": {"pack/flops_imbalance": 2.0},
    "dying workers": {"workers/math/workers": 2.0, "workers/math/restarts": float},
    "stuck threads": {"workers/math/workers": 2.0, "workers/math/stuck_threads": 1.0},
}


def of_owner(rows):
    """Return the rows of a run whose environments have names such as `acme/math`."""
    return [
        {re.sub("/(math|code)/", r"/acme/\1/", name): value for name, value in row.items()}
        for row in rows
    ]


def of_two_processes(rows):
    """Return rows of which a second process wrote the first half again, late and out of order."""
    stale = [{"step": row["step"], "entropy": 9.0} for row in rows]
    again = rows[: len(rows) // 2]
    return [*stale, *rows[len(rows) // 2 :], *again[1::2], *again[::2]]


@pytest.mark.parametrize("named", [list, of_owner])
@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_planted_fault_is_named_with_where_it_began(rule, named):
    found = {one.rule: one for one in found_in(named(healthy(100, **PLANTED[rule])))}
    assert rule in found, list(found)
    one = found[rule]
    assert 1 <= one.first_step <= one.last_step <= 100
    assert rule in one.text
    assert one.as_json()["kind"] == one.kind
    assert one.metrics


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_rows_in_any_order_tell_the_same(rule):
    rows = healthy(100, **PLANTED[rule])
    assert found_in(of_two_processes(rows)) == found_in(rows)


def test_a_rule_that_fails_is_logged_and_the_others_find_theirs(monkeypatch, rules_that_failed):
    def fails(rule, history):
        raise ZeroDivisionError

    rows = healthy(30, **PLANTED["nothing trained"])
    *others, last = RULES
    monkeypatch.setattr(rules_module, "RULES", (last._replace(find=fails), *others))
    assert [one.rule for one in found_in(rows)] == ["nothing trained"]
    rules_that_failed.append(last.name)


def test_full_caches_are_no_finding_where_nobody_waits_for_them():
    assert found_in(healthy(100, **{"servers/thrown_out": 10.0})) == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 12, 60, 400])
def test_nothing_is_found_in_healthy_runs_of_any_length(num_steps):
    assert found_in(of_owner(healthy(num_steps))) == []
    for seed in range(20):
        assert found_in(healthy(num_steps, seed)) == []


@pytest.mark.slow
def test_noise_without_a_trend_is_no_trend():
    """400 metrics of pure noise: a difference must be more than what noise gives."""
    for seed in range(400):
        draw = random.Random(seed)
        noise = {"entropy": lambda _, d=draw: abs(d.gauss(0.3, 0.2)) + 0.01}
        reward = {"task_reward/mean": lambda _, d=draw: min(1.0, max(0.0, d.gauss(0.1, 0.1)))}
        assert found_in(healthy(60, seed, **noise, **reward)) == []


@pytest.mark.parametrize("rule", ["entropy explodes", "collapse", "length shrinks"])
def test_a_change_is_said_to_be_since_it_came(rule):
    """The planted ones change between steps 50 and 60, long before the window that shows it."""
    found = {one.rule: one for one in found_in(healthy(100, **PLANTED[rule]))}
    assert 52 <= found[rule].first_step <= 58


def test_a_fault_that_ended_says_so_and_is_listed_last():
    rows = healthy(
        100,
        **{
            "truncated/fraction": lambda step: 1.0 if 20 <= step < 30 else 0.0,
            "turns/branched": 0.25,
        },
    )
    branched, truncated = found_in(rows)
    assert not branched.is_over
    assert (truncated.first_step, truncated.last_step, truncated.is_over) == (20, 29, True)
    assert "steps 20 to 29" in truncated.text


def test_what_was_learned_by_the_step_before_is_told_by_the_next():
    """A step that trained nothing, or whose gradient was not finite, leaves weights as they are."""
    untrained = {"weights/unchanged": 1.0, "optimizer/steps": None}
    assert "weights stand still" not in [one.rule for one in found_in(healthy(30, **untrained))]
    skipped = {"weights/unchanged": 1.0, "optimizer/skipped": 1.0}
    assert "weights stand still" not in [one.rule for one in found_in(healthy(30, **skipped))]


def test_few_changed_weights_are_usual_while_the_learning_rate_is_low():
    warm_up = {
        "learning_rate": lambda step: 1e-4 * min(1.0, step / 20),
        "optimizer/changed_weights": lambda step: 0.3 if step >= 10 else 0.01,
    }
    assert found_in(healthy(30, **warm_up)) == []


def test_an_environment_that_teaches_nothing_is_not_drowned():
    alone = {"signal/math/share": 1.0, "signal/code/share": 0.0}
    assert found_in(healthy(30, **alone)) == []
    weighty = {"signal/math/share": 0.99, "signal/code/share": 0.01, "signal/math/groups": 0.9}
    assert found_in(healthy(30, **weighty)) == []


def test_what_costs_time_is_no_news_while_nothing_is_learned():
    slow = {"time/generate_s": 8.0, "time/step_s": 10.0}
    found = found_in(healthy(30, **slow, **PLANTED["nothing trained"]))
    assert [one.kind for one in found] == [Kind.BROKEN]


def test_numbers_that_are_none_and_rows_without_metrics_are_left_out():
    rows = healthy(30, entropy=lambda step: math.nan if step % 2 else None)
    assert found_in([{"step": 0}, *rows, {"step": 31, "entropy": None, "text": "x"}]) == []


def test_a_collapse_in_the_first_steps_is_called_one_and_not_a_task_that_is_too_hard():
    """The quickstart with a learning rate of 2e-2: 0.33 and 0.36, then nothing."""

    def lost(good, bad):
        return lambda step: good if step < 3 else bad

    changes = {
        "task_reward/mean": lost(0.35, 0.0),
        "task_reward/std": lost(0.47, 0.0),
        "groups/discarded": lost(2.0, 16.0),
        "groups/all_at_minimum": lost(1.0, 16.0),
        "reward/max": lost(1.0, 0.0),
        "loss/total": lost(0.1, None),
        "truncated/fraction": lost(0.0, 1.0),
    }
    found = found_in(healthy(40, **changes))
    assert [(one.rule, one.first_step) for one in found] == [("collapse", 3), ("truncation", 3)]
    assert "from 0.35 to 0" in found[0].cause
    # One lucky step before is no reward that was lost.
    changes |= {"task_reward/mean": lost(0.02, 0.0), "task_reward/std": lost(0.14, 0.0)}
    assert "no signal" in [one.rule for one in found_in(healthy(40, **changes))]


def test_a_grader_that_breaks_is_looked_at_before_the_policy_is():
    """Answers are as before, and none of them earns anything from one step to the next."""
    changes = {
        "task_reward/mean": lambda step: 0.35 if step < 10 else 0.0,
        "task_reward/std": lambda step: 0.47 if step < 10 else 0.0,
        "groups/discarded": lambda step: 2.0 if step < 10 else 16.0,
    }
    (broken,) = found_in(healthy(20, **changes))
    assert (broken.rule, broken.first_step) == ("collapse", 10)
    assert "grader" in broken.remedy
    longer = {"completion_len/mean": lambda step: 5.0 if step < 10 else 12.0}
    collapsed = found_in(healthy(20, **changes, **longer))[0]
    assert "grader" not in collapsed.remedy


def test_one_reward_is_one_if_it_is_a_sum_that_is_rounded():
    sums = {"reward/min": lambda step: 0.3 if step % 2 else 0.1 + 0.2, "reward/max": 0.1 + 0.2}
    assert "one reward" in {one.rule for one in found_in(healthy(20, **sums))}
    levels = {name: lambda step: 0.3 + 1e-6 * (step % 2) for name in ("reward/min", "reward/max")}
    assert "one reward" not in {one.rule for one in found_in(healthy(20, **levels))}


def test_a_run_that_has_learned_its_task_is_not_broken_and_a_grader_that_says_yes_is():
    def solved(reward_before):
        return {
            "task_reward/mean": lambda step: 1.0 if step >= 20 else reward_before(step),
            "groups/discarded": lambda step: 16.0 if step >= 20 else 4.0,
            "groups/all_at_maximum": lambda step: 16.0 if step >= 20 else 4.0,
            "groups/all_at_minimum": 0.0,
            "reward/min": lambda step: 1.0 if step >= 20 else 0.0,
            "loss/total": lambda step: None if step >= 20 else 0.1,
        }

    assert found_in(healthy(30, **solved(lambda step: 0.5 + 0.025 * step))) == []
    jumped = {one.rule for one in found_in(healthy(30, **solved(lambda step: 0.7)))}
    assert {"no signal", "nothing trained", "one reward"} <= jumped


def test_a_trainer_that_waits_in_every_second_step_waits():
    """One step ahead, a step finds its rollouts ready because the one before waited for both."""

    def in_turn(even, odd):
        return lambda step: odd if step % 2 else even

    waits = {"time/generate_s": in_turn(9.0, 0.0), "time/step_s": in_turn(10.0, 1.5)}
    assert [one.rule for one in found_in(healthy(30, **waits))] == ["waits for rollouts"]


def test_a_tool_that_always_fails_is_named_where_few_calls_reach_it():
    calls = {
        "reward/math/tool_calls": 1.0,
        "reward/math/tool_errors/malformed": 0.4,
        "reward/math/tool_errors/bad_arguments": 0.3,
        "reward/math/tool_errors/raised": 0.3,
    }
    assert [one.rule for one in found_in(healthy(30, **calls))] == ["failing tools"]
    works = calls | {"reward/math/tool_errors/raised": 0.0}
    assert found_in(healthy(30, **works)) == []


def test_a_few_turns_that_branch_now_and_then_are_no_finding():
    assert found_in(healthy(30, **{"turns/branched": lambda step: 0.08 * (step % 3 == 0)})) == []


def test_one_environment_may_collapse_alone():
    found = found_in(healthy(100, **{"task_reward/code/mean": rising(0.4, 0.0)}))
    assert [(one.rule, one.environment) for one in found] == [("collapse", "code")]


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"importance_weight/mean": 0.85, "staleness/mean": 0.0}, "importance_weight/mean"),
        ({"importance_weight/mean": 1.09, "staleness/mean": 0.0}, None),
        ({"importance_weight/mean": 1.2}, None),
        (
            {"importance_weight/mean": 1.2, "behave_imp_weight/mean": 1.0},
            "importance_weight/mean",
        ),
        (
            {
                "importance_weight/mean": 1.0,
                "behave_imp_weight/mean": 1.2,
                "staleness/mean": 0.0,
            },
            "behave_imp_weight/mean",
        ),
        ({"importance_weight/mean": 1.0, "behave_imp_weight/mean": 1.2}, None),
        (
            {
                "importance_weight/mean": 1.2,
                "staleness/mean": 0.0,
                "effective_sample_size": 0.1,
            },
            None,
        ),
        (
            {"importance_weight/mean": 1.2, "staleness/mean": 0.0, "mismatch/mean": 0.3},
            None,
        ),
    ],
)
def test_a_mean_ratio_away_from_one_is_named_where_nothing_else_explains_it(changes, metric):
    found = [one for one in found_in(healthy(30, **changes)) if one.rule == "ratio off one"]
    assert [one.metrics[0] for one in found] == ([] if metric is None else [metric])


@pytest.mark.parametrize(
    ("share", "rules"),
    [(0.04, []), (0.06, ["some answers cut"]), (0.4, ["some answers cut"]), (0.6, ["truncation"])],
)
def test_answers_that_are_cut_are_told_once_from_a_twentieth_on(share, rules):
    found = found_in(healthy(30, **{"truncated/fraction": share}))
    assert [one.rule for one in found] == rules


def test_the_page_has_every_rule_with_its_question():
    page = (ROOT / "docs" / "reference" / "diagnosis.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert rows == [(rule.name, rule.question) for rule in RULES]
    assert set(PLANTED) == {rule.name for rule in RULES}


def test_metrics_that_rules_read_are_documented():
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    source = "".join(one.read_text() for one in Path(rules_module.__file__).parent.glob("*.py"))
    read = set(re.findall(r'"((?:[a-z_]+/)+[a-z_0-9]+)"', source))
    assert read
    assert sorted(name for name in read if f"`{name}`" not in known) == []


def test_a_history_that_grows_is_that_of_all_rows():
    rows = [
        {"step": 1, "a": 1.0, "word": "x"},
        {"step": 2, "b": 2, "none": None},
        {"step": 3, "a": math.inf, "b": 3.5, "c": True},
        {"step": 4},
    ]
    whole = History.of_rows(rows)
    for known in range(2, len(rows) + 1):
        growing = GrowingHistory([{"step": 2, "b": 7.0}, *reversed(rows[:known])])
        for row in rows[known:]:
            growing.add(row)
        found = growing.present
        assert (growing.num_steps, found.last_step) == (4, 4)
        assert found.metrics == whole.metrics
        assert all(found.named(name) == whole.named(name) for name in whole.metrics)


def test_a_teacher_is_far_from_the_start_on():
    """A student that comes nearer, however slowly, is as it should be; one that leaves is not."""
    assert not found_in(healthy(60, **{"kl/reference": rising(4.0, 3.5)}))
    [one] = found_in(healthy(60, **{"kl/reference": rising(4.0, 6.0, at=20)}))
    assert one.rule == "far from reference"
