"""Tasks of Harbor in several steps, and verifiers in sandboxes of their own."""

import io
import subprocess
import tarfile
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.adapters.harbor_folders import TABLE, write_task
from tests.adapters.harbor_playing import LOCAL, opened, playing

from telescope_adapters.harbor import _NEW_FOLDERS, check_tasks
from telescope_adapters.harbor_grading import (
    Carried,
    Graded,
    SpoiledError,
    TaskSandbox,
    _plain_files,
    combined,
    hand_over,
)
from telescope_adapters.harbor_tasks import read_tasks
from telescope_core import RolloutStatus
from telescope_core.errors import EnvironmentLoadError
from telescope_core.sandboxes.protocol import CommandResult, SandboxError, StopCause

STEPS = """
multi_step_reward_strategy = "mean"
[environment]
memory = "256M"
[agent]
timeout_sec = 40.0
[verifier]
timeout_sec = 50.0
[verifier.env]
RIGHT = "1"
[[steps]]
name = "begin"
min_reward = 0.5
[[steps]]
name = "go on"
min_reward = {reward = 0.1, style = 1.0}
[steps.agent]
timeout_sec = 30.0
[steps.verifier]
timeout_sec = 20.0
[steps.verifier.env]
RIGHT = "2"
[[steps]]
name = "end"
"""
GRADE = """mkdir -p /logs/verifier
[ "$(cat done 2>/dev/null)" = "$RIGHT" ] && r=1.0 || r=0.2
echo "{\\"reward\\": $r, \\"style\\": 0.5}" > /logs/verifier/reward.json
"""


def write_steps(folder, table=STEPS, more=None):
    """A task of three steps, of which the second one's setup looks for what the first left."""
    return write_task(
        folder,
        table=table,
        tests=GRADE,
        solution="echo 2 > done\n",
        more={
            "instruction.md": "",
            "tests/helper": "of all steps\n",
            "steps/begin/instruction.md": "First.",
            "steps/begin/solution/solve.sh": "echo 1 > done\n",
            "steps/go on/instruction.md": "<!-- canary -->\nSecond.",
            "steps/go on/workdir/setup.sh": "cat done > given; cp extra extra2\n",
            "steps/go on/workdir/extra": "a file\n",
            "steps/end/instruction.md": "Third.",
            "steps/end/tests/test.sh": f"[ -e /tests/helper ] || exit 1\n{GRADE}",
            **(more or {}),
        },
    )


def test_steps_are_read_with_what_they_share(tmp_path):
    [task] = read_tasks(write_steps(tmp_path))
    assert [step.name for step in task.steps] == ["begin", "go on", "end"]
    assert [step.instruction for step in task.steps] == ["First.", "Second.", "Third."]
    assert [step.agent_s for step in task.steps] == [40.0, 30.0, 40.0]
    assert [step.verifier_s for step in task.steps] == [50.0, 20.0, 50.0]
    assert [step.verifier_env["RIGHT"] for step in task.steps] == ["1", "2", "1"]
    assert [step.min_rewards for step in task.steps] == [
        {"reward": 0.5},
        {"reward": 0.1, "style": 1.0},
        {},
    ]
    assert [step.solution.parent.name for step in task.steps] == [
        "begin",
        tmp_path.name,
        tmp_path.name,
    ]
    assert task.missing_solution == ""
    environment = opened(tmp_path)
    life_s = environment._spec(environment.tasks[task.name]).time_to_live_s
    assert life_s == pytest.approx(40 + 30 + 40 + 50 + 20 + 50 + 900)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[[steps]]\nname = 'a'", "no instruction.md for its step 'a'"),
        ("[[steps]]\nname = '../a'", "a folder in steps/"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "two steps have the name 'a'"),
        ("[[steps]]\nname = 'a'\n[steps.agent]\nuser = 'bob'", "agent.user"),
        ("[[steps]]\nname = 'a'\n[steps.verifier.environment]\ngpus = 1", "verifier.environment.g"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "shared"),
        ("artifacts = ['../x']", "artifacts"),
        ("artifacts = [{source = '/x', service = 'db'}]", "other containers"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = 'db'", "other containers"),
    ],
)
def test_what_steps_and_verifiers_cannot_be_given_is_refused(tmp_path, table, said):
    write_task(tmp_path, table=table)
    with pytest.raises(EnvironmentLoadError) as refused:
        read_tasks(tmp_path)
    assert said in str(refused.value)


def test_a_verifier_has_the_image_beside_its_tests_or_else_that_of_the_agent(tmp_path):
    alone = f"{TABLE}[verifier.environment]\ncpus = 3\nallow_internet = false\n"
    write_task(tmp_path, table=alone)
    [task] = read_tasks(tmp_path)
    [step] = task.steps
    assert step.grader is not None
    assert (step.grader.has_tests, step.grader.context.name) == (False, "environment")
    assert (step.grader.table.cpus, step.grader.table.network_mode) == (3, "no-network")
    assert [one.source for one in step.artifacts] == ["/logs/artifacts"]
    write_task(tmp_path, table=alone, more={"tests/Dockerfile": "FROM x\nCOPY . /tests\n"})
    [step] = read_tasks(tmp_path)[0].steps
    assert step.grader is not None
    assert (step.grader.has_tests, step.grader.context.name) == (True, "tests")
    named = f"{TABLE}[verifier.environment]\ndocker_image = 'org/judge:1'\n"
    write_task(tmp_path, table=named)
    with pytest.raises(EnvironmentLoadError, match=r"\(verifier\) needs an image: org/judge:1"):
        opened(tmp_path)


def test_numbers_of_steps_are_combined_as_the_task_says(tmp_path):
    [task] = read_tasks(write_steps(tmp_path))
    steps = [
        Graded(numbers=numbers, said="", wall_s=1.0)
        for numbers in ({"reward": 1.0, "style": 0.5}, {"reward": 0.25}, {"reward": 0.25})
    ]
    assert combined(task, steps) == {"reward": 0.5, "style": 0.5 / 3}
    table = task.table.model_copy(update={"multi_step_reward_strategy": "final"})
    assert combined(replace(task, table=table), steps) == {"reward": 0.25}
    with pytest.raises(SandboxError, match="no number as reward"):
        combined(task, [Graded(numbers={"style": 1.0}, said="", wall_s=1.0)])


@pytest.mark.slow
async def test_steps_are_played_one_after_the_other_in_one_sandbox(tmp_path):
    write_steps(tmp_path / "all", table=STEPS.replace("style = 1.0", "style = 0.5"))
    write_steps(tmp_path / "gated")
    write_steps(tmp_path / "odd", more={"steps/go on/workdir/setup.sh": "exit 4\n"})
    async with playing(opened(tmp_path)) as play:
        look = "$ cat given extra2; ls /tests /logs/verifier; echo 2 > done"
        rollout, policy = await play(
            *("$ echo 1 > done; echo x > /logs/agent/mine", "first"),
            *(look, "second", "$ ls /logs/agent; echo 1 > done", "third"),
        )
        assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
        assert policy.asked[0::2] == ["First.", "Second.", "Third."]
        assert len(rollout.turns) == 6
        assert policy.asked[3].split() == ["1", "a", "file", "/logs/verifier:", "/tests:"]
        assert policy.asked[5].strip() == ""
        assert rollout.metrics["num_steps"] == 3
        assert rollout.metrics["style"] == 0.5
        said = [one.key for one in rollout.info if one.key.startswith("verifier")]
        assert said == ["verifier begin", "verifier go on", "verifier end"]
        # What falls short of a step's least reward ends there; steps that were not played count
        # for nothing.
        rollout, policy = await play("$ echo 1 > done", "first", "$ echo 2 > done", "x", index=1)
        assert rollout.reward == 1.0, rollout.error
        assert rollout.metrics["num_steps"] == 2
        rollout, policy = await play("first", index=1)
        assert (rollout.reward, len(policy.asked)) == (0.2, 1), rollout.error
        assert rollout.metrics["step_1_reward"] == 0.2
        # An agent that keeps the next step from being set up has played that one, for nothing.
        rollout, policy = await play("$ echo 1 > done; mkdir -p extra/x", "first", index=1)
        assert (rollout.reward, len(policy.asked)) == (0.5, 2), rollout.error
        assert rollout.metrics["step_2_reward"] == 0.0
        rollout, policy = await play("$ echo 1 > done; chmod 555 .", "first", "x", index=1)
        assert (rollout.reward, len(policy.asked)) == (0.6, 3), rollout.error
        rollout, _ = await play("$ echo 1 > done", "first", index=2)
        assert rollout.status is RolloutStatus.FAILED
        assert "setup.sh of its step 'go on' failed" in rollout.error


SEPARATE = """
artifacts = ["/app/out", {source = "kept", exclude = ["*.log"]}, "/app/missing"]
[environment]
memory = "256M"
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "echo collected > /logs/artifacts/more"
"""
JUDGE = """set -e
[ "$(cat /tests/right)" = 3 ] && [ "$(cat /logs/artifacts/more)" = collected ]
[ ! -e /app/words ] && [ ! -e /app/out/link ] && [ ! -e /app/kept/a.log ]
[ "$(cat /app/kept/b)" = b ] && [ "$(cat /app/out/count)" = "$(cat /tests/right)" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""


@pytest.mark.slow
async def test_a_verifier_elsewhere_sees_the_artifacts_and_nothing_else(tmp_path):
    lines = "FROM python:3.12-slim\nWORKDIR /app\nCOPY right test.sh /tests/\n"
    solution = (
        "mkdir out kept; wc -l < words > out/count; ln -s ../words out/link\n"
        "echo a > kept/a.log; echo b > kept/b; echo 9 > /tests/right\n"
    )
    write_task(
        tmp_path / "own",
        table=SEPARATE,
        tests=JUDGE,
        solution=solution,
        more={"tests/Dockerfile": lines, "tests/right": "3\n"},
    )
    shared = JUDGE.replace("[ ! -e /app/words ] && ", "[ -e /app/words ] && ")
    write_task(
        tmp_path / "same", table=SEPARATE, tests=shared, solution=solution,
        more={"tests/right": "3\n"},
    )  # fmt: skip
    # Commands of `collect` come before the tests where they share the agent's sandbox, too.
    write_task(
        tmp_path / "together",
        table="[[verifier.collect]]\ncommand = 'cp count collected'\n",
        tests="cp collected /logs/verifier/reward.txt\n",
        solution="echo 1 > count\n",
    )
    settings = {"id": str(tmp_path), **LOCAL}
    own, same, together = await check_tasks(settings, 9, lambda check: None)
    assert together.solution == 1.0, together.problems
    assert (own.solution, own.nothing, own.problems) == (1.0, 0.0, ())
    assert (same.solution, same.nothing, same.problems) == (1.0, 0.0, ())


def _tar(*entries: tuple[str, bytes | str | None]) -> bytes:
    """An archive: text is where a link leads, None a folder."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o4755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return held.getvalue()


def test_an_archive_of_the_agent_reaches_no_other_path():
    archive = _tar(
        ("app/out", None),
        ("app/out/a", b"1"),
        ("app/out/../../tests/test.sh", b"2"),
        ("/app/out/b", b"3"),
        ("app/out/l", "/tests"),
        ("app/outside", b"4"),
        ("tests/test.sh", b"5"),
        ("../app/out/c", b"6"),
    )
    found = _plain_files(archive, "/app/out")
    assert found is not None
    with tarfile.open(fileobj=io.BytesIO(found.files)) as tar:
        kept = {info.name: info.mode for info in tar}
    assert kept == {"app/out": 0o755, "app/out/a": 0o755, "app/out/b": 0o755}
    assert found.is_folder
    assert _plain_files(_tar(("tests/x", b"")), "/app/out") is None


class BoxOfUser:
    """A sandbox whose commands end with `codes`, in order."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    async def run(self, argv: list[str], **_: Any) -> CommandResult:
        code = self.codes.pop(0)
        said = b"Permission denied" if code else b""
        return CommandResult(
            stop=StopCause.EXITED, exit_code=code, stdout=b"", stderr=said, wall_s=0.0
        )


@pytest.mark.parametrize(
    ("codes", "is_of_agent"),
    # Nothing of the agent's is in the verifier's image before the files are unpacked.
    [((1,), False), ((0, 0, 2), True), ((0, 1), True), ((0, 0, 127), False)],
)
async def test_an_image_that_lets_nobody_write_is_not_the_agents_doing(codes, is_of_agent):
    place = TaskSandbox(task="sums", box=cast(Any, BoxOfUser(*codes)), folder="/", variables={})
    with pytest.raises(SandboxError) as refused:
        await hand_over(place, [Carried(path="/app", is_folder=True, files=b"")])
    assert isinstance(refused.value, SpoiledError) is is_of_agent


@pytest.mark.parametrize("is_of_other_user", [False, True])
def test_a_sandbox_whose_tests_belong_to_another_user_is_not_ready(tmp_path, is_of_other_user):
    command = _NEW_FOLDERS.replace("/logs", f"{tmp_path}/logs")
    command = command.replace("/tests", f"{tmp_path}/tests")
    # As the system answers who is not root and does not own the folder.
    refusing = "[() { false; }; chmod() { [[ $1 != u* ]]; };" if is_of_other_user else ""
    done = subprocess.run(["bash", "-c", f"{refusing} {command}"], check=False)
    assert (done.returncode != 0) is is_of_other_user
