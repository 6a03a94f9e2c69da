"""The first page of a run tells whether it learned and what went wrong: of nine kinds of runs."""

from dataclasses import replace

import pytest
from tests.core.diagnosis.test_rules import healthy, rising
from tests.core.reports.test_reports import an_eval
from tests.ui.recorded import BEGAN_S, row, write_run
from tests.ui.served import answered

from telescope_core.base.types import RolloutStatus
from telescope_core.evals import write_result
from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.reports.verdict import run_verdict

NUM_STEPS = 60
ALL_ZERO = {
    **{"loss/total": None, "task_reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0},
    **{"groups/discarded": 16.0, "groups/all_at_minimum": 16.0, "entropy": None},
}
CUT = {"truncated/fraction": rising(0.0, 0.9, at=20), "task_reward/mean": 0.2}
COLLAPSE = {"task_reward/mean": rising(0.4, 0.0, at=10), "entropy": rising(0.4, 2.4, at=10)}
RISE = {"task_reward/mean": rising(0.2, 0.5, at=20)}
ROSE, SAME = (0.2, 0.7), (0.5, 0.5)
KINDS = {
    # name: (steps, how rows differ from healthy ones, evals, how it ends,
    #        how the sentence begins, what is wrong)
    "learns": (60, RISE, {"math": ROSE}, "finished", "Learned: held-out pass@1 rose from", []),
    "does-not": (60, {"task_reward/mean": 0.3}, {"math": SAME}, "finished", "Cannot tell", []),
    "collapses": (
        *(60, COLLAPSE, {"math": (0.7, 0.0)}, "finished"),
        *("Collapsed since step ", ["collapse", "entropy explodes"]),
    ),
    "no-signal": (
        *(14, ALL_ZERO, {"math": SAME}, "finished"),
        *("Nothing was trained: none of 14 steps", ["nothing trained", "one reward", "no signal"]),
    ),
    "truncated": (60, CUT, {"math": SAME}, "finished", "Cannot tell", ["truncation"]),
    "one-stalls": (
        *(60, RISE, {"code": SAME, "math": ROSE}, "finished"),
        *("Learned: held-out pass@1 rose from", []),
    ),
    "no-eval": (60, RISE, {}, "finished", "Learned: training reward rose from 0.2", []),
    "crashed": (30, RISE, {}, "failed", "Learned: training reward rose from 0.2", []),
    "three-steps": (3, {}, {}, "running", "Too early to tell: 3 steps done", []),
}


def write_kind(path, kind):
    """Write a run whose metrics and evals are those of one kind."""
    num_steps, changes, evals, end, _, _ = KINDS[kind]
    environments = [{"name": name} for name in ("math", "code")]
    config = {
        "run": {"name": kind, "number_of_steps": NUM_STEPS if end != "finished" else num_steps},
        "environments": environments,
    }
    run = RunFolder.create(path / kind, config=config)
    run.note_reward_ranges({"math": (0.0, 1.0), "code": (0.0, 1.0)})
    for one in healthy(num_steps, **changes):
        run.log_metrics(one | {"time_s": BEGAN_S + 60.0 * one["step"]})
    for name, ends in evals.items():
        for tag, level in zip(("before", "after"), ends, strict=True):
            write_result(run.evals_path / f"{name}-{tag}", an_eval(name, level, 1))
            point = {"time_s": BEGAN_S, "name": name, "tag": tag, "folder": f"{name}-{tag}"}
            version = 0 if tag == "before" else num_steps
            done = {"version": version, "state": EvalPointState.DONE, "num_scored": 256}
            run.log_eval_point(EvalPoint(**point, **done, duration_s=30.0))
    if end == "failed":
        run.fail("a rank died")
    elif end == "finished":
        run.finish()
    return run


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nine")
    for kind in KINDS:
        write_kind(folder / "runs", kind)
    with answered([folder / "runs"], folder / "cache") as ui:
        yield folder / "runs", ui


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_page_says_whether_it_learned_and_what_is_wrong(nine, kind):
    folder, ui = nine
    num_steps, _, evals, _, begins, rules = KINDS[kind]
    page = ui.get(f"/runs/{kind}")
    text = page["verdict"]["text"]
    assert text.startswith(begins), text
    assert page["verdict"] == run_verdict(RunFolder.open(folder / kind)).as_json()
    assert [one["rule"] for one in page["diagnoses"]] == rules
    assert all(one["first_step"] >= 1 and one["remedy"] for one in page["diagnoses"])
    assert {one["environment"] for one in page["evals"]} == set(evals)
    assert [one["environment"] for one in page["rewards"]] == ["code", "math"]
    assert len(page["reward"]["steps"]) == num_steps
    if kind == "no-signal":
        assert page["reward"]["untrained"] == [[1, 14]]
        assert {tile["unit"] for tile in page["tiles"] if tile["name"] == "Entropy"} <= {"nats"}
    if kind == "one-stalls":
        assert "No difference is shown on code" in text
    if kind == "crashed":
        assert text.endswith("The run failed at step 30 of 60.")
    if kind == "three-steps":
        assert page["identity"]["left_s"] == 57 * 60.0
        assert "About 57 minutes are left." in text


def test_every_metric_is_reached_in_a_section(ui):
    page = ui.get("/runs/first")
    within = [name for section in page["sections"] for name in section["metrics"]]
    assert sorted(within) == sorted(set(page["metric_names"]) - {"time_s"})
    for section in page["sections"]:
        drawn = ui.get(f"/runs/first?section={section['name']}")["curves"]["metrics"]
        assert set(section["metrics"]) <= set(drawn)
    error = ui.get("/runs/first?section=optimzer", status=400)["error"]["message"]
    assert "section: unknown section 'optimzer'" in error


def test_a_part_of_a_run_is_drawn_with_the_averages_of_the_whole(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    for step in range(1, 101):
        gap = {} if step % 10 == 0 else {"entropy": float(step)}
        run.log_metrics({"step": step, "task_reward/mean": step / 100, **gap})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r?from=51&to=60&smooth=5&metric=entropy")
        assert page["reward"]["steps"] == list(range(51, 61))
        assert page["reward"]["smooth"][0] == pytest.approx((47 + 48 + 49 + 50 + 51) / 500)
        assert page["curves"]["metrics"]["entropy"][-1] is None
        assert page["curves"]["smooth"]["entropy"][-1] is None, "a gap stays one"
        assert page["curves"]["smooth"]["entropy"][0] == (47 + 48 + 49 + 51) / 4
        assert ui.get("/runs/r?smooth=1")["reward"]["smooth"] == []
        assert ui.get("/runs/r")["reward"]["smooth_steps"] == 10
        # The same gaps beside another run.
        compared = ui.get("/compare?run=r&from=51&to=60&metric=entropy")
        assert compared["curves"]["entropy"][0]["values"] == page["curves"]["metrics"]["entropy"]


def test_environments_have_the_range_of_their_reward_and_shares_of_their_rollouts(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    run.note_reward_ranges({"math": (0.0, 1.0), "a/b c": (-1.0, 1.0)})
    for step in (1, 2):
        rewards = {0: (0.0, 1.0), 1: (0.5, 0.5), 2: (0.0, 0.0), 3: (1.0, 0.0)}
        run.write_rollouts(
            step,
            [
                replace(
                    row(step, group, index),
                    **{"reward": reward, "advantage": reward - sum(both) / 2},
                    status=RolloutStatus.KEPT if len(set(both)) > 1 else RolloutStatus.DISCARDED,
                    is_truncated=group == 2,
                )
                for group, both in rewards.items()
                for index, reward in enumerate(both)
            ],
        )
        means = {"task_reward/math/mean": 0.25, "task_reward/a/b c/mean": 0.5}
        run.log_metrics({"step": step, "task_reward/mean": 0.375, **means})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r")
        other, math = page["rewards"]
        assert (other["environment"], math["environment"]) == ("a/b c", "math")
        assert (math["signal"], math["truncated"]) == (0.5, 0.5)
        assert (other["signal"], other["truncated"]) == (0.5, 0.0)
        assert math["mean"] == [0.25, 0.25]
        assert (math["range"], page["reward"]["range"]) == ([0.0, 1.0], [-1.0, 1.0])
        assert all(low <= 0.25 <= high for low, high in zip(math["low"], math["high"], strict=True))
        total = page["reward"]
        assert total["num_groups"] == [4, 4]
        assert all(
            low < 0.375 < high for low, high in zip(total["low"], total["high"], strict=True)
        )


def test_the_time_of_steps_and_evals_adds_up(nine):
    _, ui = nine
    time = ui.get("/runs/learns")["time"]
    seconds = {part["name"]: part["seconds"] for part in time["parts"]}
    assert sum(seconds.values()) == pytest.approx(60 * 3.0 + 2 * 30.0)
    assert time["bound_by"] == "training"
    assert time["step_s"] == {"first": 3.0, "last": 3.0}


def test_a_tile_without_a_value_says_over_which_steps(tmp_path):
    run = write_run(tmp_path / "runs" / "r", steps=1)
    for step in range(2, 14):
        run.log_metrics({"step": step, "task_reward/mean": 0.1})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        tiles = {tile["metric"]: tile for tile in ui.get("/runs/r")["tiles"]}
        assert tiles["entropy"]["value"] is None
        assert "10 steps" in tiles["entropy"]["unit"]


def test_evals_of_runs_are_compared_by_example(nine):
    _, ui = nine
    page = ui.get("/compare?run=does-not&run=learns")
    (one,) = page["evals"]
    assert (one["environment"], one["against"]) == ("math", "does-not")
    first, second = one["runs"]
    assert first["versus"] is None
    assert second["versus"]["num_tasks"] == 64
    assert second["versus"]["change"] == pytest.approx(second["mean"] - first["mean"])
    assert [run["verdict"]["outcome"] for run in page["runs"]] == ["not shown", "learned"]
    assert [course["environment"] for course in page["rewards"]] == [None, "code", "math"]
    assert [setting["name"] for setting in page["settings"] if not setting["is_place"]] == []


@pytest.mark.slow
def test_a_report_is_shown_without_its_scripts(tmp_path):
    run = write_run(tmp_path / "runs" / "r")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        token = {"authorization": f"Bearer {ui.token}"}
        assert ui.get("/runs/r")["identity"]["report"] is None
        error = ui.get("/runs/r/report.html", status=404)["error"]["message"]
        assert "telescope eval --report" in error
        run.report_path.write_text("<script>alert(1)</script>")
        address = ui.get("/runs/r")["identity"]["report"]
        answer = ui.ask(address, accept="text/html", **token)
        assert answer.body == b"<script>alert(1)</script>"
        policies = [value for name, value in answer.headers.items() if name.endswith("policy")]
        (policy,) = [one for one in policies if "default-src" in one]
        assert policy.startswith("sandbox; default-src 'none'")
        assert "script-src" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert ui.ask(address).status == 401
        outside = tmp_path / "secret"
        outside.write_text("s")
        run.report_path.unlink()
        run.report_path.symlink_to(outside)
        assert ui.ask(address, accept="text/html", **token).status == 404
