"""`telescope eval` with chosen examples, several models or environments, growth and failures."""

import json

import pytest
from tests.cli.echo import BROKEN, NAMES, telescope

from telescope_cli.eval.view import EvalProgress
from telescope_core import Rollout, Sampling
from telescope_core.evals import EvalSettings, read_result
from telescope_core.records.rows import row_of
from telescope_core.types import RolloutStatus

pytestmark = pytest.mark.usefixtures("place")


def played(place, name="out"):
    """Return the ids of the examples in an eval's folder, in the order of their records."""
    lines = (place / name / "rollouts.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["example_id"] for line in lines))


def numbers(*values):
    return [f"eval-{value}" for value in values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--env.size", 5], numbers(0, 1, 2, 3, 4)),
        (["--examples", "all", "--env.size", 7], numbers(*range(7))),
        (["--examples", 3], numbers(0, 1, 2)),
        (["--examples", "3-5,9"], numbers(3, 4, 5, 9)),
        (["--examples", "7-7"], numbers(7)),
        (["--example", "eval-12", "--example", "eval-3"], numbers(12, 3)),
    ],
)
def test_examples_are_chosen(endpoint, place, flags, expected):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--rollouts", 1, "--concurrency", 1)
    assert telescope(*command, *flags, "--output", "out") == 0
    assert played(place) == expected
    assert read_result(place / "out").num_tasks == len(expected)


@pytest.mark.slow
def test_the_default_takes_all_of_a_smaller_split_and_says_so(endpoint, capsys):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--rollouts", 1)
    assert telescope(*command, "--env.size", 5) == 0
    assert "its eval split is played whole: 5 examples" in capsys.readouterr().err
    assert telescope(*command, "--env.size", 80, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_tasks"] == 64
    assert "examples of its eval split" not in captured.err


@pytest.mark.slow
def test_shuffle_draws_from_the_whole_split_and_again_the_same(endpoint, place):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--rollouts", 1, "--examples", 6)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        assert telescope(*command, "--shuffle", seed, "--output", name) == 0
    assert sorted(played(place, "one")) == sorted(played(place, "again"))
    assert set(played(place, "one")) != set(played(place, "two"))
    assert set(played(place, "one")) != set(numbers(*range(6)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--examples", "few"], "must be a number such as 64, all, or positions such as 0-9,20"),
        (["--examples", "0"], "examples must be at least 1, got 0"),
        (["--examples", "9-3"], "9-3 runs backwards; write 3-9"),
        (["--examples", "60-64"], "has 64 examples in its eval split, got position 64"),
        (["--examples", "65"], "use at most 64, or --examples all"),
        (["--examples", "1-3", "--shuffle", 1], "--shuffle needs a number of examples or all"),
        (["--example", "eval-1", "--examples", 3], "leave out --examples and --shuffle"),
        (["--example", "eval-99"], "unknown example 'eval-99'; did you mean 'eval-9'"),
        (["--model", "tiny", "--model", "tiny"], "model 'tiny' is given twice"),
        (["echo_env:Echo"], "environment 'echo_env:Echo' is given twice"),
        (["--model", "tiny", "--model", "tinny"], "did you mean 'tiny'"),
    ],
)
def test_choices_that_cannot_be_met_are_one_message(endpoint, place, capsys, flags, message):
    assert telescope("echo_env:Echo", "--base-url", endpoint[0], *flags, "--output", "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (place / "out").exists()


@pytest.mark.slow
def test_every_model_and_environment_is_played_with_one_table(endpoint, place, capsys):
    endpoint[1][NAMES].append("other")
    code = telescope(
        *("echo_env:Echo", "echo_env:Loud", "--model", "other", "--model", "tiny"),
        *("--base-url", endpoint[0], "--examples", 4, "--rollouts", 2, "--output", "out"),
    )
    text = capsys.readouterr().out
    assert code == 0
    assert max(len(line) for line in text.splitlines() if "out/" not in line) <= 80
    folders = sorted(path.name for path in (place / "out").iterdir())
    assert folders == [
        *("echo-env-echo-other", "echo-env-echo-tiny"),
        *("echo-env-loud-other", "echo-env-loud-tiny"),
    ]
    for folder in folders:
        result = read_result(place / "out" / folder)
        assert result.model == folder.rpartition("-")[2]
        assert (result.num_scored, result.pass_at[1].mean) == (8, 0.5)
    rows = [line.split() for line in text.splitlines() if "8/8" in line]
    assert [row[:2] for row in rows] == [
        *(["echo_env:Echo", "other"], ["echo_env:Loud", "other"]),
        *(["echo_env:Echo", "tiny"], ["echo_env:Loud", "tiny"]),
    ]


@pytest.mark.slow
def test_several_evals_resume_together_and_one_that_fails_does_not_stop_the_others(
    endpoint, place, capsys
):
    url, app = endpoint
    app[BROKEN] = True
    command = (
        *("echo_env:Sevens", "echo_env:Echo", "--base-url", url, "--examples", 6),
        *("--rollouts", 1, "--output", "out"),
    )
    assert telescope(*command, "--json") == 7
    captured = capsys.readouterr()
    broken, well = json.loads(captured.out)
    assert broken["result"]["num_scored"] == 0
    assert (well["environment"], well["result"]["num_scored"]) == ("echo_env:Echo", 6)
    assert "no rollout was scored: 6 failed (EndpointError 6)" in captured.err
    app[BROKEN] = False
    assert telescope(*command, "--resume") == 0
    assert read_result(place / "out" / "echo-env-sevens").num_scored == 6


@pytest.mark.slow
def test_too_many_failures_are_exit_code_7_and_resume_plays_them_again(endpoint, place, capsys):
    url, app = endpoint
    app[BROKEN] = True
    command = ("echo_env:Echo", "--base-url", url, "--examples", 8, "--rollouts", 2)
    assert telescope(*command, "--output", "out") == 7
    error = capsys.readouterr().err
    assert "2 of 16 rollouts failed (EndpointError 2), more than --max-failed 0.1 allows" in error
    assert read_result(place / "out").num_failed == 2
    app[BROKEN] = False
    assert telescope(*command, "--output", "out", "--resume") == 0
    assert read_result(place / "out").num_scored == 16
    app[BROKEN] = True
    assert telescope(*command, "--output", "two", "--max-failed", 0.125) == 0
    assert telescope(*command, "--output", "three", "--max-failed", 0) == 7


@pytest.mark.slow
def test_an_eval_grows_at_resume_with_another_concurrency(endpoint, place, capsys):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--output", "out")
    assert telescope(*command, "--examples", 4, "--rollouts", 2) == 0
    before = (place / "out" / "rollouts.jsonl").read_text().splitlines()
    grown = ("--examples", 6, "--rollouts", 4, "--k", "1,4", "--concurrency", 1, "--resume")
    capsys.readouterr()
    assert telescope(*command, *grown) == 0
    error = capsys.readouterr().err
    assert "resuming: 8 rollouts already recorded" in error
    assert "24/24 rollouts" in error
    assert len((place / "out" / "rollouts.jsonl").read_text().splitlines()) == 6 * 4
    result = read_result(place / "out")
    assert (result.num_rollouts, result.num_scored, result.pass_at[4].num_tasks) == (24, 24, 6)
    assert (place / "out" / "rollouts.jsonl").read_text().splitlines()[: len(before)] == before
    capsys.readouterr()
    assert telescope(*command, "--examples", 6, "--rollouts", 3, "--resume") == 2
    assert "rollouts: 4 then, 3 now; it may only grow" in capsys.readouterr().err
    assert telescope(*command, *grown, "--max-tokens", 9) == 2
    assert "(sampling.max_tokens: 512 then, 9 now)" in capsys.readouterr().err


@pytest.mark.slow
def test_two_evals_at_the_same_moment_have_folders_of_their_own(endpoint, place, monkeypatch):
    monkeypatch.setattr("telescope_cli.eval.play._stamp", lambda: "20260101-000000")
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2)
    assert telescope(*command) == telescope(*command) == 0
    assert sorted(path.name for path in (place / "runs" / "evals").iterdir()) == [
        *("echo-env-echo-20260101-000000", "echo-env-echo-20260101-000000-2")
    ]


@pytest.mark.slow
def test_a_folder_in_which_another_eval_is_played_is_refused(endpoint, place, capsys):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2, "--output", "out")
    assert telescope(*command) == 0
    record = json.loads((place / "out" / "eval.json").read_text())
    record["run"] |= {"state": "running", "reason": ""}
    (place / "out" / "eval.json").write_text(json.dumps(record))
    assert telescope(*command, "--resume") == 2
    assert "still running (process " in capsys.readouterr().err


@pytest.mark.slow
def test_report_and_resume_leave_out_a_row_that_cannot_be_read_and_say_so(endpoint, place, capsys):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--examples", 4, "--output", "out")
    assert telescope(*command) == 0
    with (place / "out" / "rollouts.jsonl").open("a") as stream:
        stream.write('{"status": "kept", "messages": [{"role": "user", "content": [1]}]}\n')
    capsys.readouterr()
    assert telescope("--report", "out") == 0
    captured = capsys.readouterr()
    assert "16 of 16 rollouts scored" in captured.out
    assert "1 recorded rollout could not be read" in captured.err
    assert "rollouts.jsonl, line 17: not the row of a rollout" in captured.err
    assert telescope("--report", "out", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["unreadable"]) == 1
    assert telescope(*command, "--rollouts", 5, "--resume") == 0
    assert "line 17" in capsys.readouterr().err
    assert read_result(place / "out").num_scored == 20


@pytest.mark.parametrize(("whole_groups", "num_kept"), [(False, 3), (True, 2)])
def test_progress_counts_only_what_is_not_played_again(whole_groups, num_kept, capsys):
    rollouts = [
        Rollout(environment="e", example_id="", group_id=group, index=index, reward=1.0)
        for group, index in (("eval-000000", 0), ("eval-000000", 1), ("eval-000001", 0))
    ]
    settings = EvalSettings(num_examples=2, rollouts=2, sampling=Sampling(max_tokens=1))
    EvalProgress(settings, done=[row_of(one) for one in rollouts], whole_groups=whole_groups)
    assert f"resuming: {num_kept} rollouts" in capsys.readouterr().err


def test_progress_has_the_mean_over_examples_that_the_result_has(capsys):
    rewards = {"a": (1.0, 1.0, 1.0), "b": (0.0, None, None)}
    rows = [
        row_of(
            Rollout(
                **{"environment": "e", "example_id": name, "group_id": name, "index": index},
                reward=one,
                status=RolloutStatus.FAILED if one is None else RolloutStatus.KEPT,
            )
        )
        for name, values in rewards.items()
        for index, one in enumerate(values)
    ]
    settings = EvalSettings(num_examples=2, rollouts=3, sampling=Sampling(max_tokens=1))
    progress = EvalProgress(settings, done=[], whole_groups=False)
    for row in rows:
        progress.update(row)
    assert "6/6 rollouts, reward 0.500, 2 failed" in capsys.readouterr().err
