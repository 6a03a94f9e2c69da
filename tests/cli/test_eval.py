"""`telescope eval` as a user calls it, against a small chat endpoint on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from tests.cli.echo import BROKEN, ENVIRONMENT, NAMES, models, telescope
from tests.ports import free_port
from tests.processes import Program
from tests.ui.recorded import kill

from telescope_core.errors import NoRoomError
from telescope_core.evals import EvalFolder, read_result, write_result
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.types import RolloutStatus

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.slow
def test_eval_prints_a_table_and_writes_results(endpoint, place, capsys):
    url, _ = endpoint
    code = telescope(
        *("echo_env:Echo", "--base-url", url, "--examples", 8, "--rollouts", 4, "--k", "1,4"),
        *("--output", "out"),
    )
    text = capsys.readouterr().out
    assert code == 0
    assert "32 of 32 rollouts scored" in text
    assert "pass@1" in text
    assert "pass^4" in text
    assert "words_said, lower is better" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("Results")) <= 80
    result = read_result(place / "out")
    assert result.model == "tiny"
    assert result.pass_at[1].mean == 0.5
    assert len((place / "out" / "rollouts.jsonl").read_text().splitlines()) == 32


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "none"])
def test_json_is_alone_on_stdout_and_env_flags_reach_the_environment(endpoint, isolation, capsys):
    url, _ = endpoint
    code = telescope(
        *("echo_env:Loud", "--base-url", url, "--examples", 3, "--rollouts", 1, "--json"),
        *("--env-isolation", isolation),
        *("--env.size", 3, "--env.style=loud", "--env.words", '["a"]'),
        *("--env.inner.depth", 2),
    )
    captured = capsys.readouterr()
    assert code == 0
    assert json.loads(captured.out)["num_scored"] == 3
    assert "3/3 rollouts" in captured.err
    assert ("graded" in captured.err) is (isolation == "none")


@pytest.mark.slow
def test_a_match_is_played_against_a_model_at_another_endpoint(serve_app, place, capsys):
    """Each rollout shows what both seats said, the policy in one of them."""

    def saying(text):
        async def chat(request):
            message = {"role": "assistant", "content": text}
            choice = {"message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 5, "completion_tokens": 1}
            return web.json_response({"choices": [choice], "usage": usage})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/v1/models", models)
        app[NAMES], app[BROKEN] = ["tiny"], False
        return serve_app(app)

    (place / "nim.py").write_text((EXAMPLES / "nim.py").read_text())
    opponents = "--env.opponents.others"
    code = telescope(
        *("./nim.py:Nim", "--base-url", saying("2"), f"{opponents}.base_url", saying("Hm.")),
        *("--rollouts", 2, "--output", "out", "--json"),
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    result = json.loads(captured.out)
    assert result["num_scored"] == 6
    for line in (place / "out" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = {text["content"] for one in row["conversations"] for text in one[2::2]}
        assert said == {"2", "Hm."}
        assert sorted(row["tags"].values()) == ["opponent", "policy"]
        assert row["reward"] in (0.0, 1.0)

    command = ("./nim.py:Nim", "--base-url", "http://127.0.0.1:9/v1")
    assert telescope(*command, "--env.opponents.third.model", "m") == 2
    assert "'third'" in (problem := capsys.readouterr().err)
    assert "second" in problem


@pytest.mark.slow
def test_failed_rollouts_are_shown_apart(endpoint, capsys):
    url, app = endpoint
    app[BROKEN] = True
    code = telescope(
        *("echo_env:Echo", "--base-url", url, "--examples", 8, "--rollouts", 2, "--k", "1,2"),
        *("--output", "out", "--max-failed", 0.125),
    )
    text = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "14 of 16 rollouts scored; 2 failed (EndpointError 2)" in text
    assert text.count("Failed: EndpointError: http://127.0.0.1") == 1
    assert "pass@2 covers only 7 of 8 examples" in text
    assert "reward, failures at minimum" in text


@pytest.mark.slow
def test_an_eval_without_any_score_is_an_error(endpoint, place, capsys):
    url, app = endpoint
    app[BROKEN] = True
    (place / "echo_env.py").write_text(ENVIRONMENT.replace("prompt=str(i)", 'prompt="7"'))
    code = telescope("echo_env:Echo", "--base-url", url, "--examples", 2, "--output", "out")
    assert code == 7
    assert "no rollout was scored: 8 failed (EndpointError 8)" in capsys.readouterr().err


@pytest.mark.slow
def test_an_eval_that_stops_after_failures_in_a_row_shows_its_results(endpoint, place, capsys):
    url, app = endpoint
    app[BROKEN] = True
    command = ("echo_env:Sevens", "--base-url", url, "--examples", 8, "--rollouts", 10)
    assert telescope(*command, "--output", "out", "--json") == 7
    captured = capsys.readouterr()
    fields = json.loads(captured.out)
    assert (fields["num_rollouts"], fields["num_scored"], fields["num_failed"]) == (80, 0, 64)
    assert fields["environment_record"] is not None
    assert "64 rollouts failed in a row" in captured.err
    assert "--output out --resume" in captured.err
    assert (place / "out" / "report.html").is_file()
    run = json.loads((place / "out" / "eval.json").read_text())["run"]
    assert (run["state"], "64 rollouts failed" in run["reason"]) == ("failed", True)
    assert telescope(*command, "--output", "out", "--resume", "--max-failed", 1) == 7
    assert "no rollout was scored: 80 failed" in capsys.readouterr().err
    app[BROKEN] = False
    assert telescope(*command, "--output", "out", "--resume") == 0


@pytest.mark.slow
def test_a_reward_that_is_text_is_told_with_its_file_and_line(endpoint, place, capsys):
    broken = ENVIRONMENT.replace(
        "return float(rollout.completion_text == example.prompt)", "return '1'"
    )
    (place / "echo_env.py").write_text(broken)
    code = telescope("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2)
    assert code == 7
    error = capsys.readouterr().err
    assert "RewardError: reward Echo.correct (echo_env.py:" in error
    assert "must return a finite number, got '1' (str); return a float" in error


EXITS = ("import sys; sys.exit()", "CodeExitError: sys.exit(None) was called (echo_env.py:")
CANCELS = ("import asyncio; raise asyncio.CancelledError", "StrayCancelError: CancelledError")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "said", "isolation"),
    [
        (*EXITS, "none"),
        (*CANCELS, "none"),
        (*EXITS, "process"),
        pytest.param(*CANCELS, "process", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_is_no_failure_in_python_is_one_here(
    endpoint, place, capsys, raised, said, isolation
):
    broken = ENVIRONMENT.replace("return float(rollout.completion_text == example.prompt)", raised)
    (place / "echo_env.py").write_text(broken)
    code = telescope(
        *("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2, "--rollouts", 1),
        *("--env-isolation", isolation, "--output", "out"),
    )
    assert code == 7
    error = capsys.readouterr().err
    assert "no rollout was scored: 2 failed" in error
    assert said in error.replace(f"{place}/", "")
    assert "Traceback" not in error
    assert (place / "out" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class Inner", "import sys; sys.exit()\n\n\nclass Inner", "sys.exit(None) was called"),
        ("size = self.config.size", "import sys; sys.exit(3)", "sys.exit(3) was called"),
        (
            "    @reward",
            "    async def play(self, episode):\n"
            "        import asyncio, sys\n"
            "        async def leave():\n"
            "            sys.exit(0)\n"
            "        await asyncio.gather(leave())\n\n"
            "    @reward",
            "sys.exit(0) was called",
        ),
    ],
    ids=["at import", "in examples", "in a task of its own"],
)
def test_an_exit_of_environment_code_is_an_error_with_its_place(
    endpoint, place, capsys, old, new, said
):
    (place / "echo_env.py").write_text(ENVIRONMENT.replace(old, new, 1))
    code = telescope("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2)
    assert code not in (0, None)
    error = capsys.readouterr().err
    assert said in error
    assert "echo_env.py:" in error
    assert "Traceback" not in error


def test_a_chat_template_is_for_a_model_folder_and_must_exist(endpoint, place, capsys):
    command = ("echo_env:Echo", "--examples", 2, "--output", "out")
    assert telescope(*command, "--base-url", endpoint[0], "--chat-template", "x.jinja") == 2
    assert "--chat-template is for a model folder" in capsys.readouterr().err
    (place / "tiny").mkdir()
    (place / "tiny" / "config.json").write_text("{}")
    assert telescope(*command, "--model", "tiny", "--chat-template", "x.jinja") == 2
    assert "must be a Jinja file" in capsys.readouterr().err
    assert not (place / "out").exists()


@pytest.mark.slow
def test_resume_plays_the_rest(endpoint, place, capsys):
    url, _ = endpoint
    command = ("echo_env:Echo", "--base-url", url, "--examples", 8, "--rollouts", 2)
    telescope(*command, "--output", "out")
    lines = (place / "out" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (place / "out" / "rollouts.jsonl").write_text("".join(lines[:6]))
    (place / "out" / "results.json").unlink()
    assert telescope(*command, "--output", "out", "--resume") == 0
    assert read_result(place / "out").num_scored == 16
    assert telescope(*command, "--output", "out") == 2
    assert telescope(*command, "--seed", 1, "--output", "out", "--resume") == 2
    assert "seed" in capsys.readouterr().err


@pytest.mark.slow
def test_an_eval_on_a_full_disk_says_how_to_go_on(endpoint, place, capsys, monkeypatch):
    url, _ = endpoint
    command = ("echo_env:Echo", "--base-url", url, "--examples", 2, "--output", "out")
    with monkeypatch.context() as full:
        full.setattr(EvalFolder, "append", Mock(side_effect=NoRoomError("the disk is full")))
        assert telescope(*command) == 1
    assert "the disk is full. No finished rollout is recorded; repeat" in capsys.readouterr().err
    assert telescope(*command, "--resume") == 0
    assert read_result(place / "out").num_scored == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["echo_env:Eco", "--base-url", "URL"], 3, "did you mean Echo?"),
        (["no_such_module:Echo", "--base-url", "URL"], 3, "cannot import environment"),
        (["echo_env:Echo", "--model", "./nope"], 2, "'./nope' is not a folder"),
        (["echo_env:Echo", "--model", "./model"], 2, "did you mean 'my-model'"),
        (["echo_env:Echo", "--model", "my-model"], 2, "has no config.json"),
        (["echo_env:Echo", "--model", "my-step"], 2, "telescope export my-step --output"),
        (["echo_env:Echo"], 2, "expected --model FOLDER, or --base-url"),
        ([], 2, "expected an environment, got none"),
        (["echo_env:Echo", "--base-url", "URL", "--k", "8"], 2, "got k 8 with rollouts 4"),
        (["echo_env:Echo", "--base-url", "URL", "--k", "one"], 2, "--k must be numbers"),
        (["echo_env:Echo", "--base-url", "URL", "--examples", "99"], 2, "has 64 examples"),
        (["echo_env:Echo", "--base-url", "URL", "--model", "tinny"], 2, "did you mean 'tiny'"),
        (["echo_env:Echo", "--base-url", "localhost:1"], 2, "must begin with http"),
        (["echo_env:Echo", "--base-url", "http://[::1"], 2, "http://[::1]:8000/v1"),
        pytest.param(
            *(["echo_env:Echo", "--base-url", "http://127.0.0.1:PORT/v1"], 5, "cannot be reached"),
            marks=pytest.mark.slow,  # it is tried again for three seconds
        ),
        (["echo_env:Echo", "--base-url", "URL", "--env.sise", "3"], 2, "did you mean 'size'"),
        (["echo_env:Echo", "--base-url", "URL", "--env.size", "x"], 2, "echo_env.py): env.size: "),
        (["echo_env:Echo", "--base-url", "URL", "--env.words", "[NaN]"], 2, "NaN is not a finite"),
        (
            ["echo_env:Echo", "--base-url", "URL", "--env.inner.dept", "3"],
            2,
            "did you mean 'depth'",
        ),
        (["echo_env:Echo", "--base-url", "URL", "--env.inner.depth=x"], 2, "env.inner.depth: exp"),
        (["echo_env:Echo", "--base-url", "URL", "--env.size=1", "--env.size=2"], 2, "given twice"),
        (["echo_env:Echo", "--base-url", "URL", "--exampels", "3"], 2, "did you mean '--examples'"),
        (["echo_env:Echo", "--base-url", "URL", "--resume"], 2, "--resume needs --output"),
        (
            [
                "echo_env:Echo",
                "--base-url",
                "URL",
                "--rollouts=9999999999",
                "--concurrency=9999999999",
            ],
            2,
            "lower --concurrency to",
        ),
        (["echo_env:Echo", "other", "--base-url", "URL"], 2, "unknown environment 'other'"),
        (["--report", "nowhere"], 2, "no such folder"),
        (["--report", "my-model"], 2, "neither a run"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(
    endpoint, place, capsys, arguments, code, message
):
    (place / "my-model").mkdir()
    (place / "my-step").mkdir()
    (place / "my-step" / "checkpoint.json").write_text("{}")
    before = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    places = {"URL": endpoint[0], "PORT": str(free_port())}
    for word, meant in places.items():
        arguments = [part.replace(word, meant) for part in arguments]
    assert telescope(*arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("telescope: ")
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.slow
def test_report_shows_an_eval(endpoint, capsys):
    telescope("echo_env:Echo", "--base-url", endpoint[0], "--examples", 4, "--output", "out")
    shown = capsys.readouterr().out
    assert telescope("--report", "out") == 0
    assert capsys.readouterr().out == shown
    assert telescope("--report", "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["result"]["num_scored"] == 16


@pytest.mark.slow
def test_another_file_of_the_environment_ends_a_resume_and_is_named_in_a_comparison(
    endpoint, place, capsys
):
    url, _ = endpoint
    command = ("echo_env:Echo", "--base-url", url, "--rollouts", 1, "--examples", 4)
    telescope(*command, "--output", "one")
    path = place / "echo_env.py"
    path.write_text(path.read_text().replace("return float(", "return 1.0 - float("))
    capsys.readouterr()
    assert telescope(*command, "--output", "one", "--resume") == 2
    assert "file echo_env.py: its content is another one" in " ".join(
        capsys.readouterr().err.split()
    )
    assert telescope(*command, "--output", "two") == 0
    capsys.readouterr()
    assert telescope("compare", "one", "two", "--json") == 0
    changed = json.loads(capsys.readouterr().out)["code_changes"]
    assert changed == ["file echo_env.py: its content is another one"]


@pytest.mark.slow
def test_two_evals_are_compared_by_example(endpoint, place, capsys):
    url, _ = endpoint
    command = ("echo_env:Echo", "--base-url", url, "--rollouts", 2, "--k", "1,2")
    telescope(*command, "--examples", 8, "--output", "one")
    telescope(*command, "--examples", 6, "--temperature", 0.5, "--output", "two")
    capsys.readouterr()
    assert telescope("compare", "one", "two") == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert "pass@1: no difference shown, from 0.500 to 0.500" in flat
    assert "Note: 2 examples are left out, because only the first eval scored them." in flat
    assert "temperature: left to the endpoint -> 0.5" in flat
    assert max(map(len, text.splitlines())) <= 80
    assert "-0.459 to +0.459" in text  # on one line
    assert telescope("compare", "one", "two", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert [one["measure"] for one in fields["differences"]] == [
        *("pass@1", "pass@2", "pass^2", "reward")
    ]
    assert fields["differences"][0]["is_shown"] is False
    assert fields["num_only_before"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "nowhere"], "nowhere: no such folder; expected the folder of an eval"),
        (["one", "empty"], "empty holds no eval (eval.json)"),
        (["one", "begun"], "begun: this eval has no result yet"),
        (["one"], "Missing argument 'after'"),
    ],
)
def test_folders_that_cannot_be_compared_are_named(endpoint, place, capsys, arguments, message):
    telescope("echo_env:Echo", "--base-url", endpoint[0], "--examples", 2, "--output", "one")
    (place / "empty").mkdir()
    (place / "begun").mkdir()
    (place / "begun" / "eval.json").write_bytes((place / "one" / "eval.json").read_bytes())
    capsys.readouterr()
    assert telescope("compare", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_report_shows_a_killed_run(place, capsys):
    run = RunFolder.create(place / "runs" / "run", config={})
    about = {"environment": "math", "example_id": "x", "group_id": "g", "reward": 1.0}
    for step in range(1, 5):
        rows = [
            RolloutRow(step=step, index=index, status=status, **about)
            for index, status in enumerate((RolloutStatus.KEPT, RolloutStatus.DISCARDED))
        ]
        run.write_rollouts(step, rows)
        run.log_metrics({"step": step, "reward/mean": step / 4})
    kill(run)
    assert telescope("--report", "run") == 0
    text = capsys.readouterr().out
    assert "interrupted: process" in text
    assert "4 steps recorded" in text
    assert "0.250" in text
    assert "1.000" in text
    assert "math" in text
    assert telescope("--report", "run", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["state"] == "interrupted"
    assert fields["counts"] == {"math": {"discarded": 4, "kept": 4}}


def test_a_report_that_cannot_be_written_is_no_success(place, capsys, monkeypatch):
    run = RunFolder.create(place / "run", config={})
    run.log_metrics({"step": 1, "reward/mean": 0.5})
    run.finish()
    run.report_path.mkdir()
    assert telescope("--report", "run") == 1
    out, err = capsys.readouterr()
    assert "1 step recorded" in out
    assert "Report:" not in out
    assert "cannot use run/report.html: Is a directory" in err
    assert "telescope ui run --export" in err


@pytest.mark.slow
def test_the_report_of_a_run_compares_its_evals_by_example(endpoint, place, capsys):
    command = ("echo_env:Echo", "--base-url", endpoint[0], "--examples", 6, "--rollouts", 2)
    telescope(*command, "--output", "one")
    run = RunFolder.create(place / "run", config={})
    for tag in ("before", "after"):
        write_result(run.evals_path / f"echo-{tag}", read_result(place / "one"))
    for step in range(1, 11):
        run.log_metrics({"step": step, "reward/mean": 0.5, "optimizer/steps": 1.0})
    run.finish()
    capsys.readouterr()
    assert telescope("--report", "run") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "held-out pass@1" in text
    assert "on echo_env:Echo" in text
    assert telescope("--report", "run", "--json") == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes["echo_env:Echo"]["differences"][0]["num_tasks"] == 6


def test_report_names_why_a_run_failed(place, capsys):
    run = RunFolder.create(place / "run", config={})
    row = RolloutRow(
        step=1,
        environment="e",
        example_id="x",
        group_id="g",
        index=0,
        status=RolloutStatus.FAILED,
    )
    run.write_rollouts(1, [row])
    run.fail("ProcessDiedError: inference server 0 (process 12) is gone")
    assert telescope("--report", "run") == 0
    assert "inference server 0 (process 12) is gone" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_rollout_is_recorded_when_it_has_ended(endpoint, place):
    counted = (
        "    @metric\n    def recorded(self, rollout, example):\n"
        "        from pathlib import Path\n"
        "        files = Path('out').glob('rollouts.jsonl')\n"
        "        return float(sum(len(path.read_text().splitlines()) for path in files))\n"
        "\n\nclass Loud"
    )
    (place / "echo_env.py").write_text(ENVIRONMENT.replace("\n\nclass Loud", counted))
    few = ("--examples", 4, "--rollouts", 1, "--concurrency", 1, "--output", "out")
    assert telescope("echo_env:Echo", "--base-url", endpoint[0], *few) == 0
    rows = [json.loads(line) for line in (place / "out" / "rollouts.jsonl").open()]
    assert [row["metrics"]["recorded"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_an_interrupted_eval_keeps_its_rollouts(endpoint, place):
    url, _ = endpoint
    held = (
        "    @metric\n    def wait(self, rollout, example):\n        import threading\n"
        "        if example.prompt == '5': threading.Event().wait()\n        return 0.0\n"
    )
    (place / "echo_env.py").write_text(
        ENVIRONMENT.replace("\n\nclass Loud", f"{held}\n\nclass Loud")
    )
    command = [sys.executable, "-c", "from telescope_cli.main import main; main()", "eval"]
    command += ["echo_env:Echo", "--base-url", url, "--examples", "8", "--rollouts", "1"]
    command += ["--concurrency", "1", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "80"}
    with Program(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        for line in process.stderr:
            if line.startswith("5/8"):
                break
        process.kill()
    rows = (place / "out" / "rollouts.jsonl").read_text().splitlines()
    assert len(rows) == 5
    assert json.loads((place / "out" / "eval.json").read_text())["run"]["state"] == "running"
    assert telescope("--report", "out") == 0


KEYS = 'secrets = ("ECHO_KEY", "ECHO_OTHER_KEY")\n\n    class Config'


@pytest.mark.slow
def test_the_secrets_that_an_environment_reads_are_told_by_name(
    endpoint, place, capsys, monkeypatch
):
    (place / "echo_env.py").write_text(ENVIRONMENT.replace("class Config", KEYS, 1))
    monkeypatch.setenv("ECHO_KEY", "hunter2")
    options = ("--base-url", endpoint[0], "--examples", 2, "--rollouts", 1)
    assert telescope("echo_env:Echo", *options, "--json") == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    listed = "ECHO_KEY (set), ECHO_OTHER_KEY (not set)"
    line = f"echo_env:Echo may read these environment variables: {listed}"
    assert lines.index(line) < lines.index("2/2 rollouts, reward 0.500"), "before the first one"
    assert json.loads(said.out)["num_scored"] == 2
    assert "hunter2" not in said.out + said.err
    assert telescope("echo_env:Loud", *options) == 0
    assert lines.count(line) == 1


@pytest.mark.slow
def test_a_model_folder_that_lacks_a_tensor_is_refused_before_it_is_served(place, capsys):
    from safetensors.torch import load_file, save_file

    from telescope_train.models.tiny import make_tiny_model

    path = make_tiny_model(place / "tiny", seed=0) / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if name != "model.norm.weight"}
    save_file(kept, path, metadata={"format": "pt"})
    assert telescope("echo_env:Echo", "--model", "tiny", "--examples", 2, "--output", "out") == 2
    said = capsys.readouterr().err
    assert "model.norm.weight" in said
    assert "tiny" in said
    assert not (place / "out").exists()
