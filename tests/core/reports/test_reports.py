"""Reports of a made-up run: the page parses, holds the numbers, and asks nothing of the network."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.diagnosis import History, diagnose
from telescope_core.evals import EvalSettings, write_result
from telescope_core.evals.result import result_of
from telescope_core.protocols import EnvironmentPlace
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.reports import overview_of, sparkline
from telescope_core.reports.html import facts
from telescope_core.reports.rollouts_html import pick, run_samples
from telescope_core.reports.sparkline import moving_average
from telescope_core.reports.style import PAGE_STYLE
from telescope_core.reports.svg import (
    IntervalRow,
    Series,
    interval_chart,
    line_chart,
    standalone,
    ticks_of,
)
from telescope_core.reports.train_report import write_train_report
from telescope_core.reports.verdict import run_verdict
from telescope_core.types import EnvironmentDescription, Message, RolloutStatus, Sampling, Split

NAMES = ("math-reasoning", "countdown")
VOID = {"meta", "br", "input"}


class Checker(HTMLParser):
    """Reads a page; fails on tags that do not match, and keeps text, tags and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.tags, self.attributes = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def an_eval(name, level, seed):
    draw = random.Random(seed)
    rows = [
        RolloutRow(
            step=0,
            environment=name,
            example_id=f"e{task}",
            group_id=f"g{task:03d}",
            index=index,
            status=RolloutStatus.KEPT,
            reward=float(draw.random() < level),
        )
        for task in range(64)
        for index in range(4)
    ]
    description = EnvironmentDescription(
        name=name,
        version="0.1.0",
        reward_min=0.0,
        reward_max=1.0,
        success_threshold=1.0,
        num_examples={Split.EVAL: None},
        network="none",
    )
    settings = EvalSettings(num_examples=64, rollouts=4, sampling=Sampling(max_tokens=32))
    return result_of(rows, settings, description, model="m", duration_s=1.0)


def a_step(step, num_steps, draw):
    level = 0.15 + 0.6 * step / num_steps
    rewards = {name: min(1.0, max(0.0, draw.gauss(level, 0.08))) for name in NAMES}
    return {
        "step": step,
        "time_s": 1.7e9 + 2.0 * step,
        "reward/mean": sum(rewards.values()) / 2,
        **{f"reward/{name}/mean": value for name, value in rewards.items()},
        "loss/total": draw.gauss(0, 0.02),
        "entropy": 1.5 - step / num_steps,
        "grad_norm": abs(draw.gauss(0.5, 0.2)),
        "learning_rate": 1e-3,
        "mismatch/max": 1e-4 * draw.random(),
        "mismatch/k3": 1e-9 * draw.random(),
        "staleness/mean": 0.9,
        "staleness/max": 1,
        "tokens/rollout_per_s": draw.gauss(1500, 100),
        "tokens/train_per_s": draw.gauss(9000, 300),
        "time/step_s": 2.0,
        "time/batch_s": 1.4,
        "time/generate_s": 0.7,
        "time/wait_s": 0.3,
        "time/train_s": 0.8,
        "time/sync_s": 0.2,
        "pack/fill": 0.97,
        "completion_len/mean": draw.gauss(9, 1),
        "truncated/fraction": 0.01,
        "groups/discarded": 2,
    }


def a_rollout(step, index, draw):
    a, b = draw.randrange(10, 99), draw.randrange(10, 99)
    name = NAMES[index % 2]
    right = draw.random() < 0.1 + 0.6 * step / 80
    said = str(a + b) if right else f"<b>{a}</b> & {b}?"
    failed = index == 15
    return RolloutRow(
        step=step,
        environment=name,
        example_id=f"{name}-{a}-{b}",
        group_id=f"g{index // 4}",
        index=index,
        status=RolloutStatus.FAILED if failed else RolloutStatus.KEPT,
        status_reason="EndpointError" if failed else "",
        error="EndpointError: gone" if failed else None,
        reward=None if failed else float(right),
        messages=(
            Message(role="user", content=f"{a}+{b}="),
            Message(role="assistant", content=said),
        ),
        num_completion_tokens=len(said),
    )


def make_run(path, num_steps=80):
    draw = random.Random(1)
    config = {"run": {"name": "demo", "seed": 0}, "environments": [{"name": n} for n in NAMES]}
    run = RunFolder.create(path, config=config, name="demo")
    for step in range(1, num_steps + 1):
        run.log_metrics(a_step(step, num_steps, draw))
        if step in (1, num_steps // 2, num_steps):
            run.write_rollouts(step, [a_rollout(step, i, draw) for i in range(16)])
    for name in NAMES:
        write_result(run.evals_path / f"{name}-before", an_eval(name, 0.15, 1))
        write_result(run.evals_path / f"{name}-after", an_eval(name, 0.7, 2))
    run.finish()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


def test_report_parses_and_holds_the_numbers(run):
    page = write_train_report(run).read_text()
    checked = Checker(page)
    text = " ".join(checked.text)
    overview = overview_of(run)
    assert overview.edges.num_steps == max(1, min(20, overview.num_steps // 10))
    assert run_verdict(run).text in text
    for name in NAMES:
        before = overview.evals[f"{name}-before"].pass_at[1]
        after = overview.evals[f"{name}-after"].pass_at[1]
        assert f"from {before.mean:.3f} to {after.mean:.3f} on {name}" in text
        assert f"({after.low:.3f} to {after.high:.3f})" in text
    assert text.count("paired over 64 examples") == 2
    assert "overlap" not in text
    assert "sampling 35% (56.0 s)" in text
    assert checked.tags.count("article") == 32
    assert {"step", "reward", "status"} <= set(text.split())
    assert "environments[1].name" in text


def test_the_report_names_what_is_wrong(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step in range(1, 9):
        run.log_metrics({"step": step, "truncated/fraction": 0.9, "reward/mean": 0.5})
    found = diagnose(History.of_rows(run.metrics()))[0]
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    assert all(fact in text for fact in (found.rule, "since 1", found.cause, found.remedy))


def test_the_curve_is_of_all_that_was_sampled_where_groups_were_rejected(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step, sampled in enumerate((0.1, 0.2, 0.8, 0.9), start=1):
        kept = {"step": step, "reward/mean": 0.5, "reward/sums/mean": 0.5}
        run.log_metrics({**kept, "task_reward/mean": sampled, "task_reward/sums/mean": sampled})
    run.finish()
    overview = overview_of(run)
    assert overview.rewards == (0.1, 0.2, 0.8, 0.9)
    assert overview.edges == (0.1, 0.9, 1)
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    assert text.count("first steps 0.100, last steps 0.900") == 1


def test_evals_of_other_code_are_said_not_to_compare(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step in range(1, 5):
        run.log_metrics({"step": step, "reward/mean": 0.5})
    for tag, version in (("before", "0.1.0"), ("after", "0.2.0")):
        code = EnvironmentRecord(
            id="acme/sums", version=version, place=EnvironmentPlace.SHARED, lock_digest=version
        )
        result = replace(an_eval("sums", 0.5, 1), environment_record=code)
        write_result(run.evals_path / f"sums-{tag}", result)
        run.note_environments({"sums": code})
    run.finish()
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    reason = "because the environment's code changed in between: version: 0.1.0 -> 0.2.0."
    assert f"not comparable, {reason}" in text
    assert "acme/sums 0.2.0 shared" in text


@pytest.mark.slow
def test_evals_in_between_are_drawn_and_those_without_a_result_are_told(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step in range(1, 61):
        run.log_metrics({"step": step, "reward/mean": 0.5})
    for tag in ("before", *(f"step-{step}" for step in range(2, 60, 2)), "after"):
        write_result(run.evals_path / f"sums-{tag}", an_eval("sums", 0.5, 1))
    point = {"time_s": 0.0, "name": "sums", "num_scored": 0}
    late = {"tag": "step-60", "version": 60, "state": EvalPointState.SKIPPED}
    run.log_eval_point(EvalPoint(**point, **late, reason="the one before <had> not ended"))
    done = {"tag": "step-58", "version": 58, "state": EvalPointState.DONE}
    run.log_eval_point(EvalPoint(**point, **done))
    run.finish()
    page = write_train_report(run).read_text()
    text = " ".join(Checker(page).text)
    drawn = [step for step in range(1, 61) if f">step {step}<" in page]
    assert drawn == list(range(4, 60, 6))
    assert "eval step-60, sums: skipped: the one before <had> not ended" in text
    assert "eval step-58" not in text


def test_a_run_with_evals_on_its_way_alone_shows_the_first_and_the_last(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    for step in range(1, 31):
        run.log_metrics({"step": step, "reward/mean": 0.5})
    for step, chance in ((10, 0.15), (20, 0.3), (30, 0.7)):
        write_result(run.evals_path / f"sums-step-{step}", an_eval("sums", chance, step))
    run.finish()
    page = write_train_report(run).read_text()
    text = " ".join(Checker(page).text)
    assert [step for step in range(1, 31) if f">step {step}<" in page] == [10, 20, 30]
    assert "(step 10) to" in text
    assert text.count("paired over 64 examples") == 1


def test_evals_without_any_result_are_told(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    point = {"time_s": 0.0, "name": "sums", "num_scored": 0, "tag": "step-6", "version": 6}
    run.log_eval_point(EvalPoint(**point, state=EvalPointState.FAILED, reason="unreachable"))
    run.finish()
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    assert all(fact in text for fact in ("step-6", "sums", "unreachable"))


def test_report_asks_nothing_of_the_network(run):
    """Its only script is the filter of the rollouts, which stands in the page."""
    page = write_train_report(run).read_text()
    checked = Checker(page)
    assert not {"link", "img", "iframe"} & set(checked.tags)
    assert checked.tags.count("script") == 1
    assert not {name for name, _ in checked.attributes} & {"src", "href", "onclick"}
    assert "http" not in page
    assert "url(" not in page


def test_text_of_the_model_cannot_become_markup(run):
    page = write_train_report(run).read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("Sample rollouts")[1].split("said")[1].split("</pre>")[0]


def test_a_run_without_anything_still_has_a_report(tmp_path):
    run = RunFolder.create(tmp_path / "empty", config={})
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    assert "Too early to tell: no step has ended." in text
    assert "running" in text
    run.fail("ConfigError: port 8100 is in use")
    text = " ".join(Checker(write_train_report(run).read_text()).text)
    assert "port 8100 is in use" in text


def test_samples_are_early_and_late_good_and_bad(run):
    rows = run_samples(run)
    assert len(rows) == min(100, sum(row.step in (1, 80) for row in run.rollouts()))
    assert {row.step for row in rows} == {1, 80}
    assert {row.environment for row in rows} == set(NAMES)
    late = [row for row in rows if row.step == 80]
    assert {row.reward for row in late} >= {0.0, 1.0}


def test_the_rollouts_of_a_run_are_found_as_those_of_an_eval(run):
    page = write_train_report(run).read_text()
    checked = Checker(page)
    assert checked.tags.count("article") == len(run_samples(run)) > 10
    assert page.count("<details open>") == 3
    assert ("id", "filter") in checked.attributes  # hidden until the script shows it
    kinds = {value for name, value in checked.attributes if name == "value"}
    assert kinds >= {"step-1", "step-80", "kept", "discarded", "failed", "truncated"}


def test_pick_takes_what_there_is():
    assert pick([], 5) == []
    draw = random.Random(0)
    rows = [a_rollout(1, index, draw) for index in range(3)]
    assert sorted(row.index for row in pick(rows, 5)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 80, [0, 20, 40, 60, 80]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks_of(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 7.3, 1e6])
def test_ticks_fit_any_scale(scale):
    ticks = ticks_of(0.13 * scale, 0.97 * scale)
    assert 2 <= len(ticks) <= 7
    assert all(0.1299 * scale <= tick <= 0.9701 * scale for tick in ticks)


def test_charts_survive_gaps_constants_and_emptiness():
    for values in ([None, 1.0, None, 2.0], [3.0, 3.0, 3.0], [0.0], [None], [], [float("nan"), 1.0]):
        series = Series(name="a & b", xs=range(len(values)), values=values)
        ET.fromstring(standalone(line_chart([series], label="x < y", x_label="step")))
    tiny = IntervalRow(label="tiny", mean=0.00042, low=0.0001, high=0.00073)
    assert "0.00042 (0.0001 to 0.00073)" in interval_chart([tiny], label="means")
    rows = [IntervalRow(label="one task", mean=0.5, low=None, high=None)]
    ET.fromstring(interval_chart(rows, label="no interval"))


def test_a_point_between_two_gaps_is_drawn():
    series = Series(name="a", xs=range(3), values=[None, 1.0, None])
    chart = line_chart([series], label="a", x_label="step")
    [path] = re.findall(r'<path class="line c0" d="([^"]*)"', chart)
    assert re.fullmatch(r"M[0-9.]+ [0-9.]+h0", path)


def test_sparkline_spans_the_values_and_fits_the_width():
    line = sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    assert [ord(c) for c in line] == list(range(0x2581, 0x2589))
    assert len(sparkline(list(range(1000)), width=30)) == 30
    assert sparkline([]) == sparkline([None]) == ""
    assert len(set(sparkline([2.0, 2.0, 2.0]))) == 1
    assert sparkline([0.0, None, 1.0])[1] == " "


def test_moving_average_looks_back_only_and_skips_gaps():
    assert moving_average([1, None, 3, 5], window=2) == [1, 1, 3, 4]
    assert moving_average([None, 2], window=5) == [None, 2]


def test_a_number_of_the_facts_is_not_broken_and_words_may_be():
    shown = facts([("1,586,369", "tokens"), ("12 min 3 s", "took")])
    assert '<b class="number">1,586,369</b>' in shown
    assert "<b>12 min 3 s</b>" in shown
    assert ".fact b.number{white-space:nowrap}" in PAGE_STYLE
