"""Settings files of `telescope eval`, a training's files as such, and what `--dry-run` shows."""

import json
import sys
from itertools import chain

import pytest
from aiohttp import web
from tests.cli.echo import telescope

from telescope_cli.eval import files
from telescope_core.evals import read_result
from telescope_core.types import Split
from telescope_train.plan.load import load_train_config

NOWHERE = "http://127.0.0.1:9/v1"
MORE = '''
from typing import Literal
from telescope_core import EnvironmentConfig, Example, ListSource, MultiTurnEnvironment
from telescope_core import ToolEnvironment, reward, setup, tool
from telescope_core.errors import EndpointError


class Talk(MultiTurnEnvironment):
    """Go on for a while; there are examples to train on alone."""

    system_prompt = "Be\\nbrief."
    max_turns = 3

    def examples(self, split):
        return ListSource([Example(id="t0", prompt="Begin.")] if split == "train" else [])

    def env_response(self, messages, episode):
        return "Go on."

    @reward(weight=0.5)
    def kind(self, rollout, example):
        return 1.0

    @reward(weight=0.5)
    def short(self, rollout, example):
        return 1.0


class TrainOnly(Talk):
    """Have no other split."""

    def splits(self):
        return ("train",)


class Tools(ToolEnvironment):
    """Ask for the time."""

    def examples(self, split):
        return ListSource([Example(id="clock", prompt="What time is it?")])

    @tool
    def clock(self) -> str:
        """Tell the time."""
        return "noon"

    @reward
    def right(self, rollout, example):
        return float("noon" in rollout.completion_text)


class Program(Talk):
    """Have a program play, which asks at the endpoint."""

    async def play(self, episode):
        raise AssertionError(f"never started with {episode.endpoint}")


class Lost(Talk):
    """Need another model, which is not there, before any request."""

    @setup
    def start(self, episode):
        raise EndpointError("http://127.0.0.1:9/v1 does not answer")


class Broken(Talk):
    """Fail before any request."""

    def examples(self, split):
        return ListSource([Example(id="b0", prompt="Begin.")])

    @setup
    def start(self, episode):
        raise RuntimeError("the simulator is not installed")
'''
pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def more(place, monkeypatch):
    (place / "more_env.py").write_text(MORE)
    yield place
    sys.modules.pop("more_env", None)


def planned(capsys, *arguments, code=0):
    """Return the plan that a dry run prints as JSON."""
    assert telescope(*arguments, "--dry-run", "--json") == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """Return the only message of a command that is refused as wrong usage."""
    assert telescope(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


SUITE = f"""
base_url = "{NOWHERE}"
env_isolation = "none"
rollouts = 2
k = [1, 2]
temperature = 0.5
stop = ["END"]
extra_body = {{ top_k = 20 }}
env = {{ size = 30 }}

[[evals]]
name = "echo_env:Echo"
examples = "0-2,7"
max_tokens = 9

[evals.env]
style = "loud"

[[evals]]
name = "echo_env:Loud"
"""


def test_a_table_overrides_the_file_and_the_command_line_overrides_both(place, capsys):
    (place / "suite.toml").write_text(SUITE)
    (place / "later.yaml").write_text("temperature: 0.25\nextra_body: {min_p: 0.1}\n")
    plan = planned(
        capsys, "suite.toml", "later.yaml", "--rollouts", 3, "--env.size", 20, "--seed", 7
    )
    echo, loud = plan["evals"]
    assert (echo["environment"], loud["environment"]) == ("echo_env:Echo", "echo_env:Loud")
    for one, positions, max_tokens in ((echo, [0, 1, 2, 7], 9), (loud, [], 512)):
        settings, sampling = one["settings"], one["settings"]["sampling"]
        assert (settings["rollouts"], settings["ks"]) == (3, [1, 2])
        assert settings["positions"] == positions
        assert (sampling["temperature"], sampling["seed"]) == (0.25, 7)
        assert (sampling["max_tokens"], sampling["stop"]) == (max_tokens, ["END"])
        assert sampling["extra"] == {"top_k": 20, "min_p": 0.1}
    assert loud["settings"]["num_examples"] == 20
    assert echo["env"] == {"size": "20", "style": "loud"}
    assert loud["env"] == {"size": "20"}
    assert echo["first"]["example"] == "eval-0"
    of_table, line = "[[evals]] in suite.toml", "command line"
    assert echo["origins"] == {
        **dict.fromkeys(["base_url", "env_isolation", "k", "stop"], "suite.toml"),
        **dict.fromkeys(["temperature", "extra_body", "extra_body.min_p"], "later.yaml"),
        **dict.fromkeys(["examples", "max_tokens", "env.style"], of_table),
        **dict.fromkeys(["rollouts", "seed", "env", "env.size"], line),
        "extra_body.top_k": "suite.toml",
    }
    assert "max_tokens" not in loud["origins"]


def test_environments_on_the_command_line_are_those_that_are_played(place, capsys):
    (place / "suite.toml").write_text(SUITE)
    plan = planned(capsys, "suite.toml", "echo_env:Sevens", "echo_env:Echo", "--example", "eval-3")
    assert [one["environment"] for one in plan["evals"]] == ["echo_env:Sevens", "echo_env:Echo"]
    # Ids take the place of positions in the file, and the table's other settings stay.
    assert [one["settings"]["num_examples"] for one in plan["evals"]] == [1, 1]
    assert plan["evals"][1]["settings"]["sampling"]["max_tokens"] == 9


def test_a_table_is_of_its_environment_under_each_of_its_names(place, capsys):
    (place / "own.toml").write_text('[[evals]]\nname = "echo_env.py:Echo"\nexamples = 3\n')
    flags = ("--base-url", NOWHERE, "--env-isolation", "none")
    plan = planned(capsys, "own.toml", "./echo_env.py:Echo", "echo_env.py:Loud", *flags)
    assert [one["settings"]["num_examples"] for one in plan["evals"]] == [3, 64]
    error = refused(capsys, "own.toml", "./echo_env.py:Echo", "echo_env.py:Echo", *flags)
    assert "is given twice" in error


def test_yaml_and_toml_say_the_same(place, capsys):
    (place / "a.toml").write_text(
        f'base_url = "{NOWHERE}"\nenvironments = ["echo_env:Echo"]\nk = "1,4"\nexamples = 3\n'
        'env_isolation = "none"\n'
    )
    (place / "a.yml").write_text(
        f"base_url: {NOWHERE}\nenvironments:\n- echo_env:Echo\nk: [1, 4]\nexamples: 3\n"
        "env_isolation: none\n"
    )
    one, other = (planned(capsys, name)["evals"][0] for name in ("a.toml", "a.yml"))
    assert one["origins"].keys() == other["origins"].keys()
    assert {**one, "origins": {}} == {**other, "origins": {}}


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("\nrolouts = 4", ["suite.toml: rolouts", "did you mean 'rollouts'", "(line 2)"]),
        ('[[evals]]\nname = "a"\n[[evals]]\nname = "b"\nexmaples = 3', ["evals[1]", "(line 5)"]),
        ('[[evals]]\nname = "a"\nrollouts = [\n 1,\n]', ["expected a valid integer", "(line 3)"]),
        ('max_tokens = "many"', ["max_tokens: expected", "got 'many'", "(line 1)"]),
        ("rollouts = 0", ["rollouts", "(line 1)"]),
        ('examples = "abc"', ["examples: expected", "0-9,20", "got 'abc' (line 1)"]),
        ("examples = -1", ["examples: expected", "got -1 (line 1)"]),
        ('[[evals]]\nname = "a"\nk = "a"', ["evals[0].k: expected", "got 'a' (line 3)"]),
        ("k = []", ["k: expected", "got [] (line 1)"]),
        ("k = true", ["k: expected", "(line 1)"]),
        ('[[evals]]\nname = "a"\nmodel = "m"', ["set it at the top of the file (line 3)"]),
        ('[[evals]]\nname = "a"\noutput = "o"', ["set it at the top of the file (line 3)"]),
        ('[[evals]]\nname = "a"\nbase_url = "b"', ["set it at the top of the file (line 3)"]),
        ('\n[[evals]]\nsplit = "eval"', ["evals[0].name is required", "(line 2)"]),
        ("num_samples = 4", ["here it is called 'examples'"]),
        ('[[evals]]\nname = "a"\npass_k = [1]', ["here it is called 'k'", "(line 3)"]),
        ("resume = true", ["--resume"]),
        ('tasks = ["a"]', ["no setting here"]),
        ('[[environments]]\nname = "a"', ["[[evals]]"]),
        ("rollouts = 4", ["expected an environment"]),
        ('[[evals]]\nname = "a"\n[[evals]]\nname = "a"', ["suite.toml: ", "'a' is given twice;"]),
        ('environments = ["a", "a"]', ["suite.toml: ", "'a' is given twice;"]),
        ('environments = ["a"]\n[[evals]]\nname = "a"', ["'a' is given twice;"]),
        (
            '[[evals]]\nname = "echo_env.py:Echo"\n[[evals]]\nname = "./echo_env.py:Echo"',
            ["'./echo_env.py:Echo' is given twice, also as 'echo_env.py:Echo'"],
        ),
        ('environments = ["echo_env:Echo"]\nextra_body = { seed = 1 }', ["--seed"]),
        ('environments = ["echo_env:Echo"]\nrollouts = 1\nk = 4', ["k must not exceed"]),
    ],
)
def test_what_a_file_says_wrongly_is_one_usage_error_with_its_place(place, capsys, text, phrases):
    (place / "suite.toml").write_text(text)
    error = refused(capsys, "suite.toml", "--base-url", NOWHERE)
    assert [one for one in phrases if one not in error] == []


def test_names_of_other_programs_are_answered_with_a_setting_of_a_file():
    assert {*files.FOREIGN.values()} <= {*files.EvalFile.model_fields}


def test_a_file_that_is_missing_or_shown_with_a_report_is_refused(place, capsys):
    (place / "suite.toml").write_text(SUITE)
    assert "did you mean suite.toml" in refused(capsys, "suit.toml")
    assert "--report" in refused(capsys, "suite.toml", "--report", "runs")
    assert "--resume needs --output" in refused(capsys, "suite.toml", "--resume")


@pytest.mark.slow
def test_a_file_is_played_and_continued_as_it_is(endpoint, place, capsys):
    text = SUITE.replace(NOWHERE, endpoint[0]).replace("top_k = 20", "")
    (place / "suite.toml").write_text(f'output = "out"\nmax_failed = 1.0\n{text}')
    assert telescope("suite.toml") == 0
    folders = ["echo-env-echo", "echo-env-loud"]
    assert sorted(one.name for one in (place / "out").iterdir()) == folders
    for name, rollouts in zip(folders, (8, 60), strict=True):
        result = read_result(place / "out" / name)
        assert (result.num_scored, result.settings.sampling.temperature) == (rollouts, 0.5)
        assert result.settings.sampling.stop == ("END",)
    capsys.readouterr()
    assert "not an empty folder" in refused(capsys, "suite.toml")
    assert planned(capsys, "suite.toml", code=2)["problems"]
    plan = planned(capsys, "suite.toml", "--resume", "--rollouts", 3)
    assert (plan["problems"], plan["folders"]) == ([], [f"out/{name}" for name in folders])
    changed = planned(capsys, "suite.toml", "--resume", "--temperature", 1, code=2)
    assert ["different settings" in one for one in changed["problems"]] == [True, True]
    assert telescope("suite.toml", "--resume", "--rollouts", 3) == 0
    assert read_result(place / "out" / "echo-env-echo").num_scored == 12


TRAINING = """
[run]
name = "taught"
number_of_steps = 3
seed = 5
[model]
model = "./start"
[[environments]]
name = "echo_env:Echo"
[rollout]
max_tokens = 33
stop = ["END"]
rollout_timeout_s = 44
seed_sampling = true
env_isolation = "none"
[evals]
eval_after_training = true
[[evals.evals]]
name = "echo_env:Echo"
num_samples = 5
pass_k = [1, 4]
eval_every = 1
top_p = 0.9
env = { style = "loud" }
[[evals.evals]]
name = "more_env:TrainOnly"
separate_eval_samples = true
max_tokens = 11
temperature = 0
rollouts = 2
"""


def test_the_evals_of_a_training_are_played_as_the_run_plays_them(more, capsys):
    from telescope_train.evals.beside import eval_settings  # torch takes seconds

    (more / "run.toml").write_text(TRAINING)
    plan = planned(capsys, "run.toml", "--base-url", NOWHERE, "--model", "served")
    config = load_train_config([more / "run.toml"])
    for one, entry in zip(plan["evals"], config.evals.evals, strict=True):
        theirs = eval_settings(entry, config, num_examples=1, concurrency=1)
        ours = one["settings"]
        sampling = ours["sampling"] | ours["sampling"]["extra"]
        assert one["env"] == entry.env
        assert (ours["rollouts"], ours["ks"]) == (theirs.rollouts, list(theirs.ks))
        assert ours["deadline_s"] == theirs.deadline_s
        # What is not sent has the value that the run sends.
        assert sampling["top_p"] in (None, theirs.sampling.top_p)
        for name in ("max_tokens", "temperature", "seed", "include_stop_str_in_output"):
            assert sampling[name] == getattr(theirs.sampling, name)
        assert sampling["stop"] == list(theirs.sampling.stop)
    assert [one["settings"]["num_examples"] for one in plan["evals"]] == [5, 1]
    # Without an eval split, the run holds out the first examples to train on.
    assert [one["settings"]["split"] for one in plan["evals"]] == [Split.EVAL, Split.TRAIN]
    assert plan["models"] == ["served"]
    plan = planned(capsys, "run.toml", "--base-url", NOWHERE, "--top-p", 0.5)
    assert [one["settings"]["sampling"]["extra"]["top_p"] for one in plan["evals"]] == [0.5, 0.5]


def test_a_training_is_evaluated_with_its_model_and_its_own_errors(more, capsys, monkeypatch):
    (more / "run.toml").write_text(TRAINING)
    plan = planned(capsys, "run.toml", code=2)
    assert plan["models"] == ["./start"]
    (more / "run.toml").write_text(TRAINING.replace("num_samples", "num_sample"))
    error = refused(capsys, "run.toml")
    assert "did you mean 'num_samples'" in error
    assert "(line 20)" in error
    (more / "run.toml").write_text(TRAINING.partition("[evals]")[0])
    assert "no evals" in refused(capsys, "run.toml")
    monkeypatch.setitem(sys.modules, "telescope_train.plan.load", None)
    assert "telescope-cli[train]" in refused(capsys, "run.toml")


def test_a_file_of_another_command_is_named(more, capsys):
    (more / "run.toml").write_text(TRAINING)
    (more / "own.toml").write_text(f'base_url = "{NOWHERE}"\n')
    for order in (("run.toml", "own.toml"), ("own.toml", "run.toml")):
        error = refused(capsys, *order)
        assert "own.toml: base_url: unknown setting" in error
        assert "because run.toml has 'run'" in error
    for text in ("number_of_steps = 9", "number_of_epochs = 1", 'dataset = "a.jsonl"'):
        (more / "sft.toml").write_text(f'model = "m"\noutput = "taught"\n{text}\n')
        assert "telescope sft" in refused(capsys, "sft.toml")


class Heard:
    """An endpoint that keeps the requests that it gets."""

    def __init__(self):
        self.bodies = []
        self.app = web.Application()
        self.app.router.add_route("*", "/v1/{rest:.*}", self.answer)

    async def answer(self, request):
        if request.method == "GET":
            return web.json_response({"data": [{"id": "tiny"}]})
        self.bodies.append(await request.json())
        choice = {"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})


@pytest.mark.slow
def test_a_dry_run_asks_nothing_and_shows_the_first_request_as_it_would_be_sent(
    more, capsys, serve_app
):
    heard = Heard()
    url = serve_app(heard.app)
    names = ("more_env:Talk", "more_env:Tools")
    flags = ("--base-url", url, "--split", "train", "--rollouts", 2, "--concurrency", 1)
    before = set(more.iterdir())
    plan = planned(capsys, *names, *flags, "--env-isolation", "none")
    assert heard.bodies == []
    assert set(more.iterdir()) - before <= {more / "__pycache__"}
    talk, tools = plan["evals"]
    assert (talk["max_requests"], tools["max_requests"]) == (6, 20)
    assert talk["description"]["reward_weights"] == {"kind": 0.5, "short": 0.5}
    for one in (talk, tools):
        heard.bodies.clear()
        telescope(one["environment"], *flags, "--env-isolation", "none", "--json")
        capsys.readouterr()
        first = heard.bodies[0]
        assert one["first"]["messages"] == first["messages"]
        offered = [tool["function"]["name"] for tool in first.get("tools", [])]
        assert one["first"]["tools"] == offered
        assert 0 < len(heard.bodies) <= one["max_requests"]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["echo_env:Ecko", "--base-url", NOWHERE], "did you mean Echo"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--env.syle", "loud"], "did you mean 'style'"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--env.style", "quiet"], "'plain' or 'loud'"),
        (["echo_env:Echo", "--model", "nowhere"], "'nowhere' is not a folder"),
        (["echo_env:Echo", "--model", "empty"], "config.json"),
        (["echo_env:Echo"], "--model FOLDER"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--output", "used"], "not an empty folder"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--output", "no", "--resume"], "no such folder"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--examples", 65], "use at most 64"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--k", 9], "k must not exceed"),
        (["echo_env:Echo", "--base-url", "not-a-url"], "must begin with http:// or https://"),
        (["echo_env:Echo", "--base-url", "htp://x/v1"], "must begin with http:// or https://"),
        (["echo_env:Echo", "--base-url", "http://"], "must begin with http:// or https://"),
        (["echo_env:Echo", "--base-url", NOWHERE, "--resume"], "--resume needs --output"),
        (["more_env:Talk", "--base-url", NOWHERE], "no examples in its eval split"),
        (["more_env:Broken", "--base-url", NOWHERE], "the simulator is not installed"),
        (["more_env:Lost", "--base-url", NOWHERE, "--split", "train"], "does not answer"),
    ],
)
def test_a_dry_run_finds_what_could_not_be_played(more, capsys, arguments, phrase):
    (more / "empty").mkdir()
    (more / "used").mkdir()
    (more / "used" / "notes.txt").touch()
    before = set(more.iterdir())
    plan = planned(capsys, *arguments, "--env-isolation", "none", code=2)
    assert [phrase in one for one in plan["problems"]] == [True]
    assert set(more.iterdir()) - before <= {more / "__pycache__"}


def test_of_a_program_the_task_is_shown_and_its_requests_are_not_counted(more, capsys):
    flags = ("--base-url", NOWHERE, "--env-isolation", "none", "--split", "train")
    (one,) = planned(capsys, "more_env:Program", *flags)["evals"]
    assert one["first"]["of_program"]
    assert [message["role"] for message in one["first"]["messages"]] == ["system", "user"]
    assert one["max_requests"] is None


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_plan_holds_no_secret(place, capsys, form):
    (place / "suite.toml").write_text(
        'base_url = "http://me:hunter22@127.0.0.1:9/v1"\nenv_isolation = "none"\n'
        'extra_body = { user_token = "hunter22" }\n'
        'environments = ["echo_env:Echo"]\nenv = { inner = { depth = 2 } }\n'
    )
    assert telescope("suite.toml", "--dry-run", *form) == 0
    captured = capsys.readouterr()
    assert "depth" in captured.out
    assert "hunter22" not in captured.out + captured.err


def test_problems_of_several_environments_are_told_together(more, capsys):
    names = ("echo_env:Ecko", "more_env:Talk", "echo_env:Sevens")
    (more / "out" / "echo-env-sevens-nowhere").mkdir(parents=True)
    (more / "out" / "echo-env-sevens-nowhere" / "notes.txt").touch()
    flags = ("--env-isolation", "none", "--output", "out", "--model", "nowhere")
    plan = planned(capsys, *names, *flags, code=2)
    assert [one["environment"] for one in plan["evals"]] == ["echo_env:Sevens"]
    assert len(plan["problems"]) == 4


def test_problems_of_the_whole_command_are_told_together(place, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    flags = ("--api-key-env", "NO_SUCH_KEY", "--chat-template", "none.jinja", "--resume")
    models = ("--model", "a", "--model", "a", "--env-isolation", "none")
    plan = planned(capsys, "echo_env:Echo", "--base-url", "http://", *flags, *models, code=2)
    phrases = ("--resume needs", "'a' is given twice", "--chat-template", "NO_SUCH_KEY", "http://")
    for phrase, problem in zip(phrases, plan["problems"], strict=True):
        assert phrase in problem
    assert (len(plan["evals"]), plan["models"]) == (1, ["a"])
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    (problem,) = planned(
        capsys, "echo_env:Echo", "--base-url", "http://me:pw1@x/v1", *flags[:2], *models[4:], code=2
    )["problems"]
    assert "only one of them" in problem


def test_the_text_fits_a_terminal_and_says_what_was_not_asked(more, capsys):
    (more / "suite.toml").write_text(SUITE)
    flags = ("--env-isolation", "none", "--split", "train", "--base-url", NOWHERE, "--dry-run")
    extra = ("--extra-body", '{"repetition_penalty": 1.1}')
    assert telescope("suite.toml", "echo_env:Echo", *extra, *flags) == 0
    out = capsys.readouterr().out
    assert "[[evals]] in suite.toml" in out
    assert "20 (suite.toml)" in out
    assert "1.1 (command line)" in out
    assert telescope("more_env:Talk", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(chain.from_iterable(line.split() for line in lines))
    assert f"{NOWHERE} was not asked" in text
    assert "0.5 x kind + 0.5 x short" in text
    assert "system | Be | brief. user | Begin." in text
    assert telescope("echo_env:Echo", "--env.syle", "x", "--dry-run") == 2
    assert "cannot be played" in capsys.readouterr().out
