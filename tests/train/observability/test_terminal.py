"""The live view and the summary: they fit the terminal, and are plain lines elsewhere."""

import io
import json
import time

import pytest
from rich.console import Console

from telescope_core.records.logs import Logs
from telescope_train.observability.terminal import LiveView, print_summary
from telescope_train.summary import first_and_last


def a_row(step):
    return {
        "step": step,
        "version": step,
        "reward/mean": 0.5,
        "reward/math-reasoning/mean": 0.25 + step / 100,
        "reward/owner/a-very-long-name-of-an-environment-indeed/mean": 0.75,
        "loss/total": -0.0123,
        "loss/policy": -0.0123,
        "entropy": 1.234,
        "grad_norm": 0.5,
        "learning_rate": 1e-6,
        "tokens/rollout_per_s": 123456.0,
        "tokens/train_per_s": 1234567.0,
        "completion_len/mean": 1234.5,
        "truncated/fraction": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "mismatch/max": 3.2e-5,
        "pack/fill": 0.99,
        "rollouts/failed": 3.0,
        "groups/discarded": 12.0,
        "time/step_s": 2.0,
        "time/generate_s": 0.7,
        "time/train_s": 0.8,
        "time/sync_s": 0.2,
        "time/wait_s": 0.3,
    }


NAMES = ["math-reasoning", "owner/a-very-long-name-of-an-environment-indeed"]


def terminal(width=80, height=24):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def shown(view, width=80):
    console = Console(file=io.StringIO(), width=width, height=24)
    console.print(view._panel())
    return console.file.getvalue()


def test_panel_fits_a_small_terminal_and_shows_the_numbers():
    view = LiveView(100, [*NAMES, *(f"env-{i}" for i in range(20))], console=terminal())
    with view:
        view.phase("eval before: " + "math-reasoning " * 9)
        for step in range(1, 60):
            view.update(a_row(step))
        text = shown(view)
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert max(len(line.rstrip()) for line in lines) <= 80
    for part in ("step 59/100", "0.840", "0.750", "1.234", "123,456", "3.2e-05", "training 40%"):
        assert part in text
    assert "and 14 more" in text


@pytest.mark.parametrize("width", [34, 40, 60, 79])
def test_a_narrow_panel_cuts_no_number(width):
    view = LiveView(100, NAMES, console=terminal(width))
    view.phase("training " * 9)
    for step in range(1, 60):
        view.update(a_row(step))
    text = shown(view, width)
    words = text.split()
    for number in ("59/100", "0:00:00", "0.840", "0.750", "0.745", "123,456", "1234.5", "3.2e-05"):
        assert number in words, text
    assert "40%" in words


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(("number", "told"), [(-0.000412, "-0.000412"), (2.5e6, "2.5e+06")])
def test_small_and_large_numbers_are_told_by_their_digits(number, told, width):
    row = {
        key: number if key.startswith(("reward", "loss")) else value
        for key, value in a_row(1).items()
    }
    view = LiveView(2, NAMES, console=terminal(width))
    view.update(row)
    assert shown(view, width).split().count(told) == 2 * len(NAMES) + 2, shown(view, width)
    assert f"reward {told} (math-reasoning {told}" in view._line(row)
    assert f"loss {told} " in view._line(row)


def test_what_a_terminal_acts_on_is_escaped():
    view = LiveView(100, ["esc\x1b[31mred"], console=terminal())
    view.update(a_row(1))
    view.phase("watching esc\x1b[31mred")
    assert shown(view).count(r"esc\u001b[31mred") == 2
    console = Console(file=io.StringIO(), width=80)
    with LiveView(1, [], console=console) as plain:
        plain.note("a note of esc\x1b[31mred")
    print_summary({"name": "esc\x1b[31mred", "report": "[x]\x1b/report.html"}, console=console)
    assert "\x1b" not in console.file.getvalue()
    assert r"[x]\u001b/report.html" in console.file.getvalue()


def test_lines_hold_no_secret():
    console = Console(file=io.StringIO(), width=80)
    with LiveView(1, [], console=console, hide={"hunter2-value"}) as plain:
        plain.warn("a reward raised with hunter2-value")
        plain.phase("waiting for hunter2-value")
    said = console.file.getvalue()
    assert "a reward raised with (left out)" in said
    assert "hunter2" not in said


def test_of_earlier_steps_a_view_keeps_no_more_than_it_shows():
    view = LiveView(100, NAMES, console=terminal(), rows_before=[a_row(1), a_row(2)])
    view.update(a_row(3))
    assert [len(row) for row in view._rows] == [3, 3, len(a_row(3))]
    assert "step 3/100" in shown(view)


def test_after_going_back_a_view_shows_all_numbers_of_the_last_step_that_is_left():
    left = [a_row(1), a_row(2)]
    view = LiveView(100, NAMES, console=terminal(), rows_before=left)
    view.update(a_row(3))
    view.go_back(left)
    begun_there = LiveView(100, NAMES, console=terminal(), rows_before=left)
    # The first line has the time.
    assert shown(view).splitlines()[1:] == shown(begun_there).splitlines()[1:]
    assert "step 2/100" in shown(view)


def test_panel_shows_before_the_first_step_and_with_missing_numbers():
    view = LiveView(10, NAMES, console=terminal())
    assert "step 0/10" in shown(view)
    view.update({"step": 1, "reward/mean": None})
    assert "reward" in shown(view)


def test_without_a_terminal_each_step_is_one_line():
    console = Console(file=io.StringIO(), width=80)
    with LiveView(2, NAMES[:1], console=console) as view:
        view.phase("training")
        view.update(a_row(1))
        view.update(a_row(2))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("training")
    assert "step 2/2 reward 0.500 (math-reasoning 0.270) loss -0.012 entropy 1.234" in lines[2]
    assert "\x1b" not in console.file.getvalue()


def test_what_starting_processes_do_is_shown_with_its_time(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    view = LiveView(4, NAMES[:1], console=terminal())
    view.waits_for([("server", "compiling"), ("server", "compiling"), ("rank", "testing itself")])
    now_s = 22.0
    view.waits_for([("server", "compiling"), ("server", "compiling"), ("rank", "loading")])
    text = shown(view)
    assert "2 servers: compiling, 22 s; rank: loading, 0 s" in text
    assert max(map(len, text.splitlines())) <= 80
    view.waits_for([])
    assert "compiling" not in shown(view)


def test_without_a_terminal_a_line_tells_what_takes_long(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    console = Console(file=io.StringIO(), width=80)
    with LiveView(2, NAMES[:1], console=console) as view:
        activities = ["importing its libraries"] * 8 + ["compiling"] * 22 + ["opening"] * 3
        for second, activity in enumerate(activities):
            now_s = second
            view.waits_for([("server", activity)])
        view.waits_for([])
    assert console.file.getvalue().splitlines() == [
        "0:00:05 waiting for server: importing its libraries, 5 s",
        "0:00:13 waiting for server: compiling, 5 s",
    ]


@pytest.mark.parametrize("width", [80, 40])
def test_summary_holds_reward_and_evals(width):
    console = Console(file=io.StringIO(), width=width)
    summary = {
        "name": "quickstart",
        "compared_steps": 20,
        "first_mean": 0.2,
        "last_mean": 0.6,
        "rewards": [step / 100 for step in range(100)],
        "evals": {
            "math-reasoning": {
                "before": {"mean": 0.1, "low": 0.05, "high": 0.15},
                "after": {"mean": 0.5, "low": 0.45, "high": 0.55},
            },
            "countdown": {"after": {"mean": 0.5, "low": None, "high": None}},
        },
        "verdict": {"outcome": "learned", "text": "Learned: held-out pass@1 rose."},
        "mismatch_max": 1.5e-5,
        "report": "runs/quickstart/report.html",
    }
    print_summary(summary, console=console)
    text = console.file.getvalue()
    assert "(+0.400, first to last 20 steps)" in " ".join(text.split())
    assert "0.100 (0.050 to 0.150)" in text
    assert "0.500 (0.450 to 0.550)" in text
    assert "Learned: held-out pass@1 rose." in text
    assert "1.5e-05 nats" in text
    assert "runs/quickstart/report.html" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5], "reward 0.500 (too few steps for a change)"),
        ([0.0, 1.0], "1.000 (+1.000, first to last step)"),
        ([0.0, 0.2, 0.9, 0.8, 1.0], "1.000 (+1.000, first to last step)"),
        # A run that begins well and collapses in three steps, of forty.
        ([0.33, 0.3, 0.1, *[0.0] * 37], "(-0.182, first to last 4 steps)"),
        ([0.0] * 200 + [1.0] * 200, "1.000 (+1.000, first to last 20 steps)"),
    ],
)
def test_the_summary_never_compares_a_step_with_itself(rewards, expected):
    console = Console(file=io.StringIO(), width=80)
    print_summary({"name": "x", "rewards": rewards, **first_and_last(rewards)}, console=console)
    assert expected in console.file.getvalue()


def test_summary_of_a_run_without_steps_prints():
    console = Console(file=io.StringIO(), width=80)
    print_summary({"name": "x", "steps": 0, "rewards": [], "evals": {}}, console=console)
    assert "run x finished" in console.file.getvalue()


def test_what_a_person_is_told_is_logged_and_shown_once(tmp_path, capsys):
    console = Console(file=io.StringIO(), width=200)
    with Logs(folder=tmp_path).begin("driver"), LiveView(2, NAMES[:1], console=console) as view:
        view.phase("training")
        view.note("a checkpoint is written")
        view.warn("a rank died (100 %s)")
        view.update(a_row(1))
    rows = [json.loads(line) for line in (tmp_path / "driver.jsonl").read_text().splitlines()]
    told = [(row["level"], row["message"]) for row in rows[1:]]
    assert told[:3] == [
        ("info", "training"),
        ("info", "a checkpoint is written"),
        ("warning", "a rank died (100 %s)"),
    ]
    assert "step 1/2 reward" in told[3][1]
    assert console.file.getvalue().count("a rank died") == 1
    assert capsys.readouterr().err == ""
