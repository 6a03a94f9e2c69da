"""`telescope rescore`: the saved rollouts of a run, graded by another version of an environment."""

import asyncio
import json
import shutil
import sys
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path

import pytest
from tests.asking import ask

from telescope_cli import main as cli
from telescope_cli.rescore import _saved
from telescope_core.evals import EvalFolder, EvalResult, EvalSettings, compare_results
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.playing.rollout import score_group
from telescope_core.records import RunFolder, RunState, row_of
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Group, RolloutStatus, Sampling, Split, TurnInfo

ENVIRONMENT = '''
import asyncio
import os
import signal
from telescope_core import (
    EnvironmentConfig, Example, MultiTurnEnvironment, SingleTurnEnvironment, group_reward, metric,
    reward,
)
from telescope_core.environments.usage import count, remark
from telescope_core.judge import Judge, JudgeConfig


class Sums(SingleTurnEnvironment):
    """Its grader takes an answer with spaces around it for wrong."""

    class Config(EnvironmentConfig):
        size: int = 6

    def examples(self, split):
        return [
            Example(id=f"{split}-{i}", prompt=f"{i} + {i}?", answer=str(2 * i))
            for i in range(self.config.size)
        ]

    @reward(weight=0.9)
    def correct(self, completion, answer):
        return float(completion == answer)

    @reward(weight=0.1)
    def short(self, completion):
        return float(len(completion) < 4)


class Mended(Sums):
    @reward(weight=0.9)
    def correct(self, completion, answer):
        return float(completion.strip() == answer)


class Crashes(Mended):
    """It cannot read a longer answer."""

    @reward(weight=0.1)
    def short(self, completion):
        return {1: 1.0, 2: 1.0}[len(completion)]


class Judged(Mended):
    def __init__(self, config=None):
        super().__init__(config)
        self.judge = Judge(JudgeConfig(), self)

    @reward(weight=0.1)
    async def short(self, rollout, example):
        return (await self.judge.score(rollout, example, rubric="short")).score


class Remarking(Sums):
    """Its grader notes what it found, as judges do."""

    said = "then"

    @reward(weight=0.1)
    def short(self, completion):
        count("judge/calls", 2.0)
        remark("judge", self.said)
        return float(len(completion) < 4)


class RemarkingAnew(Remarking):
    said = "now"

    @reward(weight=0.1)
    def short(self, completion):
        return {1: 1.0, 2: 1.0}[len(completion)] * super().short(completion)


class Others(Mended):
    def examples(self, split):
        print("printed beside the JSON")
        return [one for one in super().examples(split) if not one.id.endswith("-0")]


class Groups(Mended):
    reward_max = 2.0

    @group_reward
    def first(self, rollouts):
        return [float(one.index == rollouts[0].index) for one in rollouts]


class Telling(Mended):
    secrets = ("RESCORE_KEY",)

    @reward(weight=0.1)
    def short(self, completion):
        raise OSError("refused " + os.environ["RESCORE_KEY"])


class Interrupted(Mended):
    @reward(weight=0.1)
    async def short(self, completion):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()


class Turns(MultiTurnEnvironment):
    max_turns = 3

    def examples(self, split):
        return [Example(id=f"{split}-{i}", prompt="guess", answer=str(i)) for i in range(6)]

    def env_response(self, messages, episode):
        said = episode.state.setdefault("said", [])
        said.append(messages[-1].content)
        return None if said[-1] == episode.example.answer else "no"

    @reward
    def found(self, state, answer):
        return float(answer in state["said"])


class TurnsTold(Turns):
    def env_response(self, messages, episode):
        told = super().env_response(messages, episode)
        return told and "no, not " + messages[-1].content

    @metric
    def last(self, completion):
        return float(completion or 0)
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "sums_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("sums_env", None)


def save_run(name, answers, *, folder="runs/r", entries=(), steps=2, rollout=()):
    """Write a run in which each step has a group of rollouts for each list of replies."""
    environment = load_environment_class(f"sums_env:{name}").from_settings({})
    entries = entries or [{"name": f"sums_env:{name}", "env": {}}]
    run = RunFolder.create(
        Path(folder),
        config={"environments": list(entries), "rollout": {"max_tokens": 8, **dict(rollout)}},
    )
    numbers = count()

    async def play():
        client = InProcessEnvironment(environment, name=entries[0]["name"])
        for step in range(1, steps + 1):
            rows = []
            for position, group in enumerate(answers):
                index = next(numbers) % len(answers)
                key = f"{step - 1}.{position}"
                played = []
                for number, replies in enumerate(group):
                    request = ask(group_id=key, index=number, example_index=index)
                    policy = ScriptedClient(replies).policy("r")
                    played.append(await client.play(request, policy))
                example = await client.example(Split.TRAIN, index)
                whole = Group(
                    id=key,
                    environment=client.name,
                    example_id=example.id,
                    rollouts=tuple(played),
                )
                scored = await score_group(environment, whole, example)
                rows += [row_of(one, step=step) for one in scored.rollouts]
            run.write_rollouts(step, rows)
        await client.close()

    asyncio.run(play())
    run.finish()
    return run


# The first group is right, the second right but for a space, the third wrong.
ANSWERS = [[["0"], ["0"]], [["2"], [" 2"]], [["9"], ["nine"]]]


def rescore(*arguments, isolated=False):
    place = [] if isolated else ["--env-isolation", "none"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["rescore", *map(str, arguments), *place])
    return ended.value.code or 0


def as_json(capsys, *arguments, **more):
    assert rescore(*arguments, "--json", **more) == 0
    return json.loads(capsys.readouterr().out)


def test_the_mended_version_says_what_the_bug_cost(place, capsys):
    save_run("Sums", ANSWERS)
    found = as_json(capsys, "r", "--env", "sums_env:Mended")
    reward, correct, short = found["reward"], *found["parts"]
    assert (found["num_rollouts"], found["num_graded"]) == (12, 12)
    assert (reward["num_compared"], reward["num_rose"], reward["num_fell"]) == (12, 2, 0)
    assert (correct["name"], correct["num_rose"]) == ("correct", 2)
    assert (short["name"], short["num_rose"], short["num_fell"]) == ("short", 0, 0)
    # Three examples: 0, +0.45 and 0 on average.
    assert reward["difference"]["num_tasks"] == 3
    assert reward["difference"]["after"] - reward["difference"]["before"] == pytest.approx(0.15)
    assert found["groups"] == {"num_compared": 6, "gained": [], "lost": ["0.1", "1.1"]}
    assert [(one["step"], one["num_rose"]) for one in found["steps"]] == [(1, 1), (2, 1)]
    (largest,) = found["largest"]
    assert (largest["before"], largest["after"]) == pytest.approx((0.1, 1.0))
    assert (largest["example_id"], largest["completion"]) == ("train-1", " 2")


@pytest.mark.slow
def test_the_same_version_gives_the_same_rewards(place, capsys):
    save_run("Groups", ANSWERS, folder="runs/g")
    save_run("Turns", [[["0"], ["1", "0"]], [["5", "5", "5"], ["1"]]], folder="runs/t")
    for name, folder in (("Groups", "g"), ("Turns", "t")):
        found = as_json(capsys, folder, "--env", f"sums_env:{name}")
        assert found["num_graded"] == found["num_rollouts"] == found["reward"]["num_compared"]
        assert found["reward"]["num_rose"] + found["reward"]["num_fell"] == 0
        assert [found["largest"], found["errors"], found["left_out"]] == [[], {}, {}]


def test_the_table_fits_and_names_what_changed(place, capsys):
    save_run("Sums", ANSWERS)
    assert rescore("runs/r", "--env", "sums_env:Mended") == 0
    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert "train-1" in printed.out
    assert "12 of 12 rollouts graded, 2 steps" in printed.out
    assert printed.err == ""


def test_a_grader_that_crashes_is_counted_by_part(place, capsys):
    save_run("Sums", ANSWERS)
    found = as_json(capsys, "r", "--env", "sums_env:Crashes")
    short = next(one for one in found["parts"] if one["name"] == "short")
    assert (found["reward"]["num_compared"], found["reward"]["num_failed"]) == (10, 2)
    assert (short["num_compared"], short["num_failed"], short["num_gone"]) == (10, 2, 0)
    assert found["parts"][0]["num_compared"] == 12
    ((text, number),) = found["errors"].items()
    assert number == 2
    assert "KeyError: 4" in text


@pytest.mark.slow
def test_a_judge_is_left_out_by_name_and_the_rest_is_graded(place, capsys):
    save_run("Sums", ANSWERS)
    found = as_json(capsys, "r", "--env", "sums_env:Judged")
    assert found["left_out"] == {"short": {"it asks a judge": 12}}
    assert (found["reward"]["num_left_out"], found["reward"]["num_gone"]) == (12, 0)
    assert found["parts"][0]["num_rose"] == 2
    assert rescore("r", "--env", "sums_env:Judged") == 0
    assert "--ask-judges" in capsys.readouterr().out


def test_a_conversation_that_goes_otherwise_is_left_out_by_name(place, capsys):
    save_run("Turns", [[["0"], ["1", "0"]], [["5", "5", "5"], ["1"]]])
    found = as_json(capsys, "r", "--env", "sums_env:TurnsTold")
    # Four of the rollouts have one turn, or say the same.
    assert found["reward"]["num_compared"] == 4
    (why,) = found["left_out"]["found"]
    assert "after turn 1" in why


def test_examples_that_are_gone_and_rollouts_that_failed_are_counted(place, capsys):
    run = save_run("Sums", ANSWERS)
    rows = run.rollouts([2])
    cut = [row for row in rows if row.group_id == "1.1"]
    failed = RolloutStatus.FAILED
    from dataclasses import replace

    changed = [
        replace(cut[0], status=RolloutStatus.CANCELLED, reward=None, rewards={}),
        replace(cut[1], status=failed, status_reason="EndpointError", reward=None, rewards={}),
    ]
    run.write_rollouts(2, [*(row for row in rows if row not in cut), *changed])
    found = as_json(capsys, "r", "--env", "sums_env:Others")
    assert sorted(found["not_graded"].values()) == [1, 1, 4]
    assert any("not in the train split" in why for why in found["not_graded"])
    assert any("EndpointError" in why for why in found["not_graded"])


def test_steps_and_environments_are_chosen(place, capsys):
    entries = [{"name": f"sums_env:{name}", "env": {}} for name in ("Sums", "Turns")]
    save_run("Sums", ANSWERS, entries=entries, steps=3)
    chosen = as_json(
        capsys, "r", "--env", "sums_env:Mended", "--of", "sums_env:Sums", "--steps", "2-9"
    )
    assert [one["step"] for one in chosen["steps"]] == [2, 3]
    assert chosen["num_rollouts"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["r", "--env", "sums_env:Mended"], "--of"),
        (["r", "--env", "sums_env:Mended", "--of", "sums_env:Sum"], "sums_env:Sums"),
        (["r", "--env", "sums_env:Sums", "--steps", "7"], "1 to 2"),
        (["r", "--env", "sums_env:Sums", "--steps", "x"], "10-20,40"),
        (["r", "--env", "sums_env:Sums", "more"], "more"),
        (["r", "--env", "sums_env:Sums", "--stepz", "1"], "--steps"),
        (["r", "--env", "sums_env:Sums", "--env.siz", "3"], "size"),
        (["r", "--env", "sums_env:Sums", "--concurrency", "0"], "concurrency"),
        (["rr", "--env", "sums_env:Sums"], "did you mean 'r'"),
        (["r", "--env", "gym:FrozenLake-v1", "--of", "sums_env:Sums"], "--ask-judges"),
    ],
)
def test_what_cannot_be_meant_is_refused(place, capsys, arguments, words):
    entries = [{"name": f"sums_env:{name}", "env": {}} for name in ("Sums", "Turns")]
    save_run("Sums", [[["0"]]], entries=entries)
    assert rescore(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"api_key": "s"}, "--env.api_key"),
        ({"judge": {"extra_body": {"token": "s"}}}, "--env.judge.extra_body.token"),
        ({"urls": ["http://a?key=s"]}, "--env.urls"),
    ],
)
def test_a_secret_that_the_folder_does_not_hold_is_asked_for(place, capsys, settings, name):
    save_run("Sums", [[["0"]]], entries=[{"name": "sums_env:Sums", "env": settings}])
    assert rescore("r", "--env", "sums_env:Sums") == 2
    assert f"give it again with {name} VALUE" in capsys.readouterr().err


@pytest.mark.slow
def test_the_new_rewards_are_a_folder_that_evals_read(place, capsys):
    save_run("Sums", ANSWERS)
    assert rescore("r", "--env", "sums_env:Mended", "--output", "out") == 0
    folder = EvalFolder(Path("out"))
    rows = {(row.group_id, row.index): row for row in folder.rows()}
    assert len(rows) == 12
    assert rows["0.1", 1].reward == pytest.approx(1.0)
    assert rows["0.1", 1].rewards == {"correct": 1.0, "short": 1.0}
    assert folder.info().state is RunState.FINISHED
    assert folder.result().num_scored == 12
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "--report", "out"])
    assert not ended.value.code
    assert "sums_env:Mended" in capsys.readouterr().out
    # An eval folder can be graded again.
    found = as_json(capsys, "out", "--env", "sums_env:Sums")
    assert (found["reward"]["num_fell"], found["steps"][0]["step"]) == (2, 1)
    assert rescore("r", "--env", "sums_env:Mended", "--output", "out") == 2
    said = capsys.readouterr().err
    assert "choose another --output, or remove it: a rescore is not continued" in said
    assert "--resume" not in said


def test_notes_and_costs_of_the_new_grades_are_with_them(place):
    run = save_run("Remarking", [[["0"], ["nine"]]], steps=1)
    run.write_rollouts(
        1,
        [
            replace(row, info=(TurnInfo(turn=0, key="own", value="kept"), *row.info))
            for row in run.rollouts([1])
        ],
    )
    assert rescore("r", "--env", "sums_env:RemarkingAnew", "--output", "out") == 0
    graded, failed = EvalFolder(Path("out")).rows()
    assert [(one.key, one.value) for one in graded.info] == [("own", "kept"), ("judge", "now")]
    assert graded.metrics["judge/calls"] == 2.0
    # Its part raised before it noted anything.
    assert failed.reward is None
    assert [one.value for one in failed.info] == ["kept", "then"]


PLAYED = EvalSettings(
    num_examples=6,
    rollouts=2,
    ks=(1, 2),
    sampling=Sampling(
        max_tokens=8, temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None
    ),
    concurrency=3,
    deadline_s=7.0,
    split=Split.TRAIN,
    max_retries=2,
    max_failures_in_a_row=None,
    positions=(5, 4, 3, 2, 1, 0),
)


def save_eval(*, has_result):
    """Write the folder `played`, of an eval at an endpoint that left most settings to it."""
    save_run("Sums", ANSWERS)
    assert rescore("r", "--env", "sums_env:Sums", "--output", "first") == 0
    first = EvalFolder(Path("first"))
    about = {"environment": "sums_env:Sums", "env": {}, "model": "m", "base_url": "http://there"}
    about |= {"chat_template": "0123456789ab", **asdict(PLAYED)}
    folder = EvalFolder.create(Path("played"), manifest=about)
    for row in first.rows():
        folder.append(row)
    result = replace(
        first.result(), settings=PLAYED, chat_template="0123456789ab", model="m", num_rollouts=12
    )
    if has_result:
        folder.finish(result)
    return result


@pytest.mark.parametrize("has_result", [True, False])
def test_the_rescore_of_an_eval_has_all_of_its_settings(place, has_result):
    played = save_eval(has_result=has_result)
    assert rescore("played", "--env", "sums_env:Mended", "--output", "out") == 0
    graded = EvalFolder(Path("out")).result()
    written = json.loads(Path("out/results.json").read_text())["settings"]
    assert written == json.loads(json.dumps(asdict(PLAYED)))
    differing = {one.name for one in fields(EvalResult)} - {"settings"}
    differing = {name for name in differing if getattr(graded, name) != getattr(played, name)}
    assert differing == {
        *("environment", "environment_record", "reward", "reward_with_failures", "rewards"),
        *("pass_at", "pass_all", "tasks", "duration_s"),
    }
    assert set(graded.pass_at) == set(graded.pass_all) == {1, 2}
    assert compare_results(played, graded).setting_changes == ()


def test_an_eval_and_its_rescore_have_the_same_rollouts_and_are_compared(place, capsys):
    save_eval(has_result=True)
    assert rescore("played", "--env", "sums_env:Mended", "--output", "out") == 0
    lines = Path("out/rollouts.jsonl").read_text().replace("nine", "nein")
    shutil.copytree("out", "others")
    Path("others/rollouts.jsonl").write_text(lines)

    def compared(other):
        with pytest.raises(SystemExit):
            cli.main(["eval", "compare", "played", other, "--json"])
        return json.loads(capsys.readouterr().out)

    capsys.readouterr()
    found = compared("out")
    assert found["is_graded_again"]
    assert found["code_changes"]
    assert {one["is_comparable"] for one in found["differences"]} == {True}
    assert {one["is_comparable"] for one in compared("others")["differences"]} == {False}


def test_the_rescore_of_a_run_has_its_sampling(place):
    save_run("Sums", ANSWERS, rollout={"temperature": 0.5, "stop": ["\n"]})
    assert rescore("r", "--env", "sums_env:Mended", "--output", "out") == 0
    expected = Sampling(max_tokens=8, temperature=0.5, stop=("\n",))
    assert EvalFolder(Path("out")).result().settings.sampling == expected


@pytest.mark.parametrize("split", [Split.TRAIN, Split.EVAL])
def test_the_rescore_of_a_run_is_of_the_split_that_it_trained_on(place, split):
    save_run("Sums", ANSWERS, entries=[{"name": "sums_env:Sums", "env": {}, "split": split.value}])
    assert _saved("r", "sums_env:Mended", None, None).split is split


def test_a_new_folder_that_is_removed_meanwhile_is_not_made_anew(place, capsys, monkeypatch):
    save_run("Sums", ANSWERS)
    whole = EvalFolder.append

    def removed(folder, row):
        shutil.rmtree(folder.path, ignore_errors=True)
        whole(folder, row)

    monkeypatch.setattr(EvalFolder, "append", removed)
    assert rescore("r", "--env", "sums_env:Mended", "--output", "out") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the folder out is gone" in said
    assert said.endswith("; a rescore is not continued: repeat the command")
    assert not Path("out").exists()


def test_a_signal_is_noted_in_the_folder_and_the_run_stays(place, capsys):
    run = save_run("Sums", ANSWERS)
    before = [row.reward for row in run.rollouts()]
    assert rescore("r", "--env", "sums_env:Interrupted", "--output", "out") == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("telescope: interrupted by SIGTERM. The rewards so far are in ")
    assert said.endswith("; remove it, or choose another --output, and repeat the command")
    assert EvalFolder(Path("out")).info().state is RunState.INTERRUPTED
    assert [row.reward for row in run.rollouts()] == before


@pytest.mark.slow
def test_it_runs_in_a_process_of_its_own_and_tells_its_secrets(place, capsys, monkeypatch):
    monkeypatch.setenv("RESCORE_KEY", "hunter2-secret")
    save_run("Sums", ANSWERS)
    code = rescore("r", "--env", "./sums_env.py:Telling", "--output", "out", isolated=True)
    printed = capsys.readouterr()
    assert code == 0
    assert "RESCORE_KEY (set)" in printed.err
    assert "OSError: refused" in printed.out
    written = "".join(path.read_text() for path in Path("out").rglob("*.json*"))
    assert "hunter2" not in printed.out + printed.err + written
