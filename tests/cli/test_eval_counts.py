"""What qualifies a result: the same numbers in the terminal, the report and the JSON."""

import json
import re
import sys
from dataclasses import replace

import pytest
from aiohttp import web
from tests.cli.echo import telescope
from tests.core.reports.test_reports import Checker

from telescope_cli.console import report_console
from telescope_cli.eval.view import print_results, result_table
from telescope_cli.rescore_view import print_rescored
from telescope_core.base.number_text import format_metric
from telescope_core.evals import EvalFolder, EvalSettings
from telescope_core.evals.rescoring import (
    GroupChange,
    PartChange,
    Rescored,
    RewardChange,
    StepChange,
)
from telescope_core.evals.result import (
    count_lines,
    counts_of,
    left_out_of,
    result_of,
    reward_parts,
)
from telescope_core.evals.stats import Estimate
from telescope_core.records import RolloutRow
from telescope_core.types import (
    EnvironmentDescription,
    RolloutStatus,
    Sampling,
    Split,
    StopReason,
)

ENVIRONMENT = '''
from telescope_core import MultiTurnEnvironment, metric, reward, stop

FATES = ["plain", "cut", "cut", "context", "context", "context", "goes on", "goes on", "filtered",
         "refused", "once more", "odd", "odd"]
failed = set()


class Fates(MultiTurnEnvironment):
    """Each prompt says what becomes of its rollout."""

    max_turns = 2
    data = {
        "train": [{"prompt": f"train {n}"} for n in range(7)],
        "eval": [*({"prompt": fate, "n": n} for n, fate in enumerate(FATES)),
                 {"prompt": "plain", "n": 0}, {"prompt": "cut", "n": 1}],
    }

    def env_response(self, messages, episode):
        return "go on"

    @stop
    def is_done(self, episode):
        return episode.example.prompt not in ("goes on", "context")

    @reward
    def correct(self, example):
        if example.prompt == "once more" and example.id not in failed:
            failed.add(example.id)
            raise ConnectionError("not yet")
        return 1.0

    @metric(low=0, high=1)
    def ungradable(self, example):
        return float(example.prompt == "odd")
'''
TOO_LONG = {"error": {"message": "the context is full", "code": "context_length_exceeded"}}
WANTED = {
    "num_truncated": (2, "truncated by max_tokens"),
    "context_length": (3, "ended by the model's context"),
    "max_turns": (2, "ended by the limit of turns"),
    "num_filtered": (1, "stopped by a content filter"),
    "num_refused": (1, "refused by the model"),
    "num_failed_attempts": (1, "played again after a failure"),
    "num_ungradable": (2, "with an answer that could not be graded"),
    "num_held_out": (7, "examples of the train split"),
    "num_dropped": (2, "rows left out as repeated or held out"),
}
DESCRIPTION = EnvironmentDescription(
    name="sums",
    version="0.1.0",
    reward_min=0.0,
    reward_max=1.0,
    success_threshold=1.0,
    num_examples={Split.EVAL: 9, Split.TRAIN: None},
    network="none",
)
SETTINGS = EvalSettings(num_examples=7, rollouts=1, sampling=Sampling(max_tokens=32))


async def answer(request):
    messages = (await request.json())["messages"]
    fate = messages[0]["content"]
    if fate == "context" and len(messages) > 1:
        return web.json_response(TOO_LONG, status=400)
    reasons = {"cut": "length", "filtered": "content_filter"}
    message = {"role": "assistant", "content": "yes"}
    if fate == "refused":
        message["refusal"] = "No."
    choice = {"message": message, "finish_reason": reasons.get(fate, "stop")}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 2}})


@pytest.fixture
def endpoint(serve_app):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return serve_app(app)


@pytest.mark.slow
def test_the_terminal_the_report_and_the_json_have_the_same_counts(
    endpoint, tmp_path, monkeypatch, capsys
):
    (tmp_path / "fates_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = telescope(
        *("fates_env:Fates", "--base-url", endpoint, "--model", "tiny", "--rollouts", 1),
        *("--examples", "all", "--output", "out"),
    )
    sys.modules.pop("fates_env", None)
    terminal = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert telescope("--report", "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)["result"]
    report = " ".join(
        " ".join(Checker((tmp_path / "out" / "report.html").read_text()).text).split()
    )
    for name, (number, text) in WANTED.items():
        found = result[name] if name in result else result["stop_reasons"][name]
        assert found == number, name
        for shown in (terminal, report):
            assert re.search(rf"(?<![\d,]){number} {re.escape(text)}", shown), (name, shown)
    assert (result["num_scored"], result["num_rollouts"], result["split_size"]) == (13, 13, 13)
    assert "3 of 13 scored rollouts reached the end of the model's context; serve" in terminal


@pytest.mark.slow
def test_more_examples_than_there_are_says_where_the_others_are(
    endpoint, tmp_path, monkeypatch, capsys
):
    (tmp_path / "rows_env.py").write_text(
        "from telescope_core import SingleTurnEnvironment, reward\n\n"
        "class Rows(SingleTurnEnvironment):\n"
        '    data = [{"prompt": f"plain {n}"} for n in range(20)]\n\n'
        "    @reward\n    def correct(self):\n        return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = ("rows_env:Rows", "--base-url", endpoint, "--model", "tiny", "--rollouts", 1)
    assert telescope(*asked, "--examples", 20) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert telescope(*asked, "--examples", "all", "--output", "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    sys.modules.pop("rows_env", None)
    assert result["split_size"] + result["num_held_out"] == 20
    assert f"Its train split has {result['num_held_out']} more, which --split train" in refused
    assert "data = {'train': ..., 'eval': ...}" in refused


def test_each_way_of_being_cut_is_counted_and_old_results_count_nothing():
    rows = [
        RolloutRow(
            step=0,
            environment="sums",
            example_id=reason,
            group_id=reason,
            index=0,
            status=RolloutStatus.KEPT,
            reward=1.0,
            stop_reason=reason,
        )
        for reason in StopReason
    ]
    result = result_of(rows, SETTINGS, DESCRIPTION, model="m", duration_s=1.0)
    cut = ("truncated by max_tokens", "model's context", "limit of turns", "time limit")
    for words in cut:
        assert [one.number for one in counts_of(result) if words in one.text] == [1], words
    assert [(one.number, one.text) for one in left_out_of(result)] == [
        (2, "other examples of the eval split")
    ]
    old = replace(result, stop_reasons={}, num_truncated=0, split_size=None)
    assert [one.number for one in counts_of(old)] == [0]
    assert left_out_of(old) == []


def test_parts_of_a_reward_are_shown_if_there_are_several():
    def row(index, **rewards):
        return RolloutRow(
            **{"step": 0, "environment": "sums", "example_id": "a", "group_id": "a"},
            **{"index": index, "status": RolloutStatus.KEPT, "reward": 0.5, "rewards": rewards},
        )

    about = replace(DESCRIPTION, reward_weights={"right": 1.0, "style": 0.25})
    rows = [row(0, right=1.0, style=0.5), row(1, right=0.0, style=1.0)]
    result = result_of(rows, SETTINGS, about, model="m", duration_s=1.0)
    assert result.rewards == {"right": 0.5, "style": 0.75}
    names, means = (list(column.cells) for column in result_table(result).columns[:2])
    assert dict(zip(names[1:3], means[1:3], strict=True)) == {
        "  right, weight 1": "0.500",
        "  style, weight 0.25": "0.750",
    }
    single = result_of([row(0, right=1.0)], SETTINGS, about, model="m", duration_s=1.0)
    assert not any("right" in name for name in result_table(single).columns[0].cells)
    assert reward_parts(replace(result, rewards={})) == []


def test_a_result_says_in_text_and_in_a_notebook_what_the_command_says():
    rows = [
        RolloutRow(
            **{"step": 0, "environment": "sums", "example_id": example, "group_id": example},
            **{"index": 0, "status": RolloutStatus.KEPT, "reward": value, "rewards": {}},
            metrics={"<b>": 2.0},
        )
        for example, value in (("a", 0.0), ("b", 1.0), ("c", 1.0))
    ]
    settings = replace(SETTINGS, num_examples=3, rollouts=1, ks=(1,))
    result = result_of(rows, settings, DESCRIPTION, model="m & n", duration_s=1.0)
    of_command = zip(*(column.cells for column in result_table(result).columns), strict=True)
    printed = [" ".join(cells).split() for cells in of_command]
    title, head, *lines = str(result).splitlines()
    assert title == "sums 0.1.0, model m & n"
    assert head.split() == ["measure", "mean", "95%", "interval", "tasks"]
    assert [line.split() for line in lines[: len(printed)]] == printed
    assert lines[len(printed) :] == count_lines(result)
    assert printed[0] == ["reward", "0.667", "0.000", "to", "1.000", "3"]
    assert len({len(line) for line in (head, *lines[:2])}) == 1, "columns are aligned"
    shown = result._repr_html_()
    assert "<caption>sums 0.1.0, model m &amp; n</caption>" in shown
    assert '">&lt;b&gt;</td><td>2.000</td>' in shown
    assert shown.count("<tr>") == 1 + len(printed)


def test_report_shows_each_eval_of_a_folder_of_several(tmp_path, capsys):
    for model in ("small", "large"):
        folder = EvalFolder.create(tmp_path / "both" / model, manifest={})
        folder.finish(result_of([], SETTINGS, DESCRIPTION, model=model, duration_s=1.0))
    assert telescope("--report", str(tmp_path / "both")) == 0
    text = capsys.readouterr().out
    assert text.index("model large") < text.index("model small")
    assert telescope("--report", str(tmp_path / "both"), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["result"]["model"] for one in shown] == ["large", "small"]
    (tmp_path / "empty").mkdir()
    assert telescope("--report", str(tmp_path / "empty")) == 2
    assert "or of several evals" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("ks", [(1, 2), (1, 2, 4)])
def test_further_ks_are_in_the_table_of_several_evals_or_said_to_be_elsewhere(ks, capsys):
    settings = replace(SETTINGS, rollouts=4, ks=ks)
    result = result_of([], settings, DESCRIPTION, model="m", duration_s=1.0)
    half = Estimate(mean=0.5, low=0.25, high=0.75, num_tasks=2)
    result = replace(result, pass_at=dict.fromkeys(ks, half), pass_all=dict.fromkeys(ks))
    print_results(report_console(), ("environment", "model"), [(("sums", "m"), result)] * 2)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    if ks == (1, 2):
        assert "pass@1 95% interval pass@2 pass^2 reward" in text
        assert "sums m 0.500 0.250 to 0.750 0.500 - - 0/" in text
    else:
        assert "Also pass@2, pass@4, pass^2, pass^4 of each: telescope eval --report FOLDER" in text


def test_a_tiny_mean_such_as_a_cost_keeps_its_digits():
    shown = [format_metric(value) for value in (0.0, 0.5, -0.25, 1234.5, 0.00042, -3.2e-7)]
    assert shown == ["0.000", "0.500", "-0.250", "1234.500", "0.00042", "-3.2e-07"]


def test_tables_keep_the_digits_of_tiny_and_huge_rewards(capsys):
    for scale, cells in (
        (1.0, ["0.400", "0.100 to 0.700"]),
        (1e-3, ["0.0004", "0.0001 to 0.0007"]),
        (1e9, ["4e+08", "1e+08 to 7e+08"]),
    ):
        mean, low, high = (scale * one for one in (0.4, 0.1, 0.7))
        result = result_of([], SETTINGS, DESCRIPTION, model="m", duration_s=1.0)
        reward = Estimate(mean=mean, low=low, high=high, num_tasks=2)
        table = result_table(replace(result, reward=reward))
        assert [next(iter(column.cells)) for column in table.columns[1:3]] == cells
    steps = tuple(
        StepChange(step=step, num_compared=1, num_rose=1, num_fell=0, before=1e-4, after=7e-4)
        for step in (1, 2)
    )
    largest = RewardChange(
        **{"step": 1, "group_id": "g", "index": 0, "example_id": "e", "before": 1e-4},
        **{"after": 7e-4, "parts": {}, "answers": ("", ""), "completion": ""},
    )
    counts = ("num_compared", "num_rose", "num_fell", "num_failed")
    zeros = dict.fromkeys((*counts, "num_left_out", "num_new", "num_gone"), 0)
    reward = PartChange(**{**zeros, "name": "reward", "num_rose": 1, "difference": None})
    rescored = Rescored(
        **{"num_rollouts": 2, "num_graded": 2, "reward": reward, "parts": (), "steps": steps},
        **{"groups": GroupChange(num_compared=0, gained=(), lost=()), "largest": (largest,)},
        **{"not_graded": {}, "left_out": {}, "errors": {}},
    )
    for number, told in ((1, "graded, 1 step\n"), (0, "graded\n")):
        one = replace(rescored, steps=(replace(steps[0], step=number),))
        print_rescored(one, title="", code_changes=(), hide=())
        assert told in capsys.readouterr().out
    print_rescored(rescored, title="", code_changes=(), hide=())
    text = capsys.readouterr().out
    assert "graded, 2 steps\n" in text
    assert "0.0001 -> 0.0007  step 1" in text
    assert len(re.findall(r"0\.0001 +0\.0007 +\+0\.0006", text)) == 2
