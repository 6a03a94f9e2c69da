"""`report.html` of an eval: every rollout with who said what, and controls to find one."""

import pytest
from tests.chromium import browser
from tests.core.reports.test_reports import Checker

from telescope_core.evals import EvalFolder, EvalSettings
from telescope_core.evals.result import result_of
from telescope_core.records import RolloutRow
from telescope_core.reports import write_eval_report
from telescope_core.types import (
    EnvironmentDescription,
    Message,
    MetricRange,
    RolloutStatus,
    Sampling,
    Split,
    ToolCall,
    TurnInfo,
)


def a_row(index, reward, **changes):
    call = ToolCall(id="1", name="add", arguments='{"a": 2}')
    fields = {
        "step": 0,
        "environment": "sums",
        "example_id": f"e{index}",
        "group_id": f"eval-{index:06d}",
        "index": 0,
        "status": RolloutStatus.KEPT,
        "reward": reward,
        "rewards": {"correct": reward, "brief": 0.25},
        "metrics": {"tool_calls": 2.0, "tool_calls/add": 2.0, "slips": 1.0},
        "golden_answers": {"answer": "four <4>"},
        "tags": {"attempts": "2"},
        "info": (TurnInfo(turn=1, key="judge", value='{"score": 0.5, "reason": "too short"}'),),
        "messages": (
            Message(role="system", content="Be brief."),
            Message(role="user", content=f"Question {index}"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="4", tool_call_id="1"),
            Message(role="assistant", content=f"It is {index}.", reasoning="hm \ud83d"),
        ),
    }
    return RolloutRow(**{**fields, **changes})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    description = EnvironmentDescription(
        name="sums",
        version="0.1.0",
        reward_min=0.0,
        reward_max=1.0,
        success_threshold=1.0,
        num_examples={Split.EVAL: None},
        network="none",
        metrics={"slips": MetricRange(low=0, lower_is_better=True)},
    )
    rows = [a_row(index, float(index % 2)) for index in range(6)]
    rows.append(a_row(6, 0.7 + 0.2 + 0.1, is_truncated=True))  # less than 1 by rounding
    lost = {"status": RolloutStatus.FAILED, "status_reason": "EndpointError", "error": "<gone>"}
    rows.append(a_row(7, None, rewards={}, **lost))
    settings = EvalSettings(num_examples=8, rollouts=1, sampling=Sampling(max_tokens=32))
    folder = EvalFolder.create(tmp_path_factory.mktemp("eval") / "sums", manifest={})
    for row in rows:
        folder.append(row)
    folder.finish(result_of(rows, settings, description, model="m", duration_s=1.0))
    return write_eval_report(folder)


def test_each_rollout_shows_roles_answers_numbers_and_what_the_judge_said(path):
    checked = Checker(path.read_text())
    text = " ".join(" ".join(checked.text).split())
    for role in ("system", "user", "assistant", "tool"):
        assert text.count(f" {role} ") >= 8
    assert text.count("expected: answer four <4>") == 8
    assert text.count('judge, turn 2 {"score": 0.5, "reason": "too short"}') == 8
    assert 'add({"a": 2})' in text
    assert "reward correct 1" in text
    assert "tool_calls/add 2" in text
    assert "attempts 2" in text
    assert "<gone>" in text


def test_metrics_of_tools_are_listed_with_their_direction(path):
    text = " ".join(" ".join(Checker(path.read_text()).text).split())
    words = text.split()
    assert words[words.index("tool_calls/add") + 1] == "2.000"
    assert words[words.index("slips") + 1 :][:4] == ["lower", "is", "better", "1.000"]


def test_the_mean_with_failures_at_the_minimum_stands_below_the_mean(path):
    assert "failures at minimum" in Checker(path.read_text()).text


def test_parts_of_the_reward_are_listed(path):
    text = " ".join(" ".join(Checker(path.read_text()).text).split())
    assert (
        "Parts of the reward Unweighted means over examples, as of the reward. reward mean" in text
    )
    assert "brief 0.250 correct 0.571" in text


def test_the_page_loads_nothing_and_shows_all_without_scripts(path):
    checked = Checker(path.read_text())
    attributes = dict(checked.attributes)
    assert {"src", "href"}.isdisjoint(attributes)
    assert checked.tags.count("article") == 8
    assert ("id", "filter") in checked.attributes  # hidden until the script shows it


def test_a_rollout_is_solved_like_in_the_counts(path):
    kinds = [value for name, value in Checker(path.read_text()).attributes if name == "data-kind"]
    assert sorted(kinds) == ["failed"] + ["solved"] * 3 + ["solved truncated"] + ["unsolved"] * 3


@pytest.mark.slow
def test_rollouts_are_found_by_kind_and_by_word_in_a_browser(path, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.complaints.clear()
        page.open(path.as_uri())
        shown = "[...document.querySelectorAll('.sample')].filter(e => !e.hidden).length"
        assert page.evaluate(shown) == 8
        assert page.evaluate("document.querySelectorAll('.sample details[open]').length") == 3
        for kind, count in (("solved", 4), ("unsolved", 3), ("failed", 1), ("truncated", 1)):
            page.evaluate(f"kind.value = '{kind}'; kind.onchange()")
            assert page.evaluate(shown) == count
            assert page.evaluate("shown.textContent") == f"{count} of 8 shown"
        page.evaluate("kind.value = ''; document.querySelector('#text').focus()")
        page.type("question 3")
        assert page.evaluate(shown) == 1
        page.click("#open")
        assert page.evaluate("document.querySelectorAll('.sample details[open]').length") == 8
        for width in (320, 1100):
            page.resize(width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.complaints == []
