"""Task folders of Harbor: what is read, what is refused by name, and how tasks are graded."""

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from tests.adapters.harbor_folders import DOCKERFILE, GRADE, TABLE, write_task
from tests.adapters.harbor_hosts import TRIED, TRIES, OnLoopback, web
from tests.adapters.harbor_playing import HARNESS, LOCAL, opened, playing
from tests.adapters.linking import telescope
from tests.core.harnesses.agents import AGENT
from tests.core.sandboxes.containers import IMAGE, podman_service

from telescope_adapters.harbor import HarborEnvironment, check_tasks
from telescope_adapters.harbor_images import build_of, local_image, user_of
from telescope_adapters.harbor_tasks import read_tasks
from telescope_core import RolloutStatus, Split, StopReason
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnknownNameError
from telescope_core.sandboxes import Network


def test_a_folder_of_tasks_is_read(tmp_path):
    write_task(tmp_path / "one")
    write_task(tmp_path / "two", table=f'[task]\nname = "org/second"\n{TABLE}')
    (tmp_path / "readme").mkdir()
    one, two = read_tasks(tmp_path)
    assert (one.name, two.name) == ("one", "org/second")
    assert (one.table.environment.memory_mb, one.table.agent.timeout_sec) == (256, 30.0)
    assert [task.name for task in read_tasks(tmp_path / "one")] == ["one"]
    assert [task.name for task in read_tasks(tmp_path, ["two"])] == ["one"]
    before = one.digest
    (tmp_path / "one" / "tests" / "test.sh").chmod(0o755)
    assert read_tasks(tmp_path)[0].digest != before
    with pytest.raises(UnknownNameError, match="org/second"):
        read_tasks(tmp_path, ["org/secnd"])
    environment = opened(tmp_path, tasks="train")
    assert environment.splits() == (Split.TRAIN,)
    [first, _] = environment.examples(Split.TRAIN)._examples
    assert first.prompt == (tmp_path / "one" / "instruction.md").read_text()


def test_marks_for_those_who_look_for_leaks_are_not_sent(tmp_path):
    for marks in ("<!-- a canary GUID 1 -->\n# Canary 2\n\n", "# canary\n", "\ufeff# canary\n"):
        write_task(tmp_path / "one", more={"instruction.md": f"{marks}# Title\n\n# no canary\n"})
        assert read_tasks(tmp_path)[0].steps[0].instruction == "# Title\n\n# no canary\n"


def test_a_byte_order_mark_is_no_part_of_a_task(tmp_path):
    task, instruction = f"\ufeff{TABLE}", {"instruction.md": "\ufeffCount."}
    write_task(tmp_path / "one", table=task, more=instruction)
    (one,) = read_tasks(tmp_path)
    assert one.steps[0].instruction == "Count."


def test_what_is_no_task_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        read_tasks(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no task\.toml"):
        read_tasks(tmp_path)
    for text, said in (
        ("[agent", "cannot be read"),
        ("[agent]\ntimeout_sec = 'long'", r"agent\.timeout_sec"),
        ("[environment]\nmemory = 'much'", "much"),
    ):
        write_task(tmp_path / "odd", table=text)
        with pytest.raises(EnvironmentLoadError, match=f"odd: .*{said}"):
            read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[environment]\nos = 'windows'", "windows"),
        ("[environment]\nskills_dir = '/skills'", "skills"),
        ("[[environment.mcp_servers]]\nname = 'x'\ncommand = 'x'", "mcp_servers.0"),
        ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'", "TPU"),
        ("[agent]\nuser = 'alice'", "agent.user"),
    ],
)
def test_what_cannot_be_given_is_refused_with_the_task(tmp_path, line, said):
    write_task(tmp_path / "asks", table=line)
    with pytest.raises(EnvironmentLoadError) as refused:
        read_tasks(tmp_path)
    assert "asks " in str(refused.value)
    assert said in str(refused.value)
    assert "leave_out" in str(refused.value)


def test_what_a_folder_lacks_or_has_too_much_of_is_refused(tmp_path):
    write_task(tmp_path / "asks", more={"environment/docker-compose.yaml": "services: {}"})
    os.remove(tmp_path / "asks" / "tests" / "test.sh")
    with pytest.raises(EnvironmentLoadError, match=r"tests/test\.sh.*several containers"):
        read_tasks(tmp_path)


def test_a_variable_that_is_not_set_is_named_when_the_folder_is_opened(tmp_path, monkeypatch):
    table = f'{TABLE}[environment.env]\nKEY = "${{HARBOR_KEY}}"\nMODE = "${{HARBOR_MODE:-fast}}"\n'
    write_task(tmp_path / "asks", table=table)
    with pytest.raises(EnvironmentLoadError, match="asks needs the variable HARBOR_KEY"):
        opened(tmp_path)
    monkeypatch.setenv("HARBOR_KEY", "k1")
    environment = opened(tmp_path)
    variables = environment._variables(environment.tasks["asks"].image)
    assert (variables["KEY"], variables["MODE"]) == ("k1", "fast")


def test_each_task_gets_what_it_asks_for(tmp_path):
    write_task(tmp_path / "small")
    named = TABLE.replace('memory = "256M"', "memory_mb = 512\nstorage_mb = 10240")
    write_task(tmp_path / "large", table=named.replace("timeout_sec = 30.0", ""))
    environment = opened(tmp_path)
    small, large = (environment._spec(environment.tasks[name]) for name in ("small", "large"))
    assert (small.memory_mb, large.memory_mb) == (256, 512)
    # Files of a local sandbox are in memory.
    assert (large.disk_mb, large.network) == (512, Network.ENDPOINT)
    times = [environment._agent_s(environment.tasks[name].steps[0]) for name in ("small", "large")]
    assert times == [30.0, 600.0]
    environment = opened(tmp_path, agent_timeout_s=5.0, memory_mb=128)
    assert environment._agent_s(environment.tasks["small"].steps[0]) == 5.0
    assert environment._spec(environment.tasks["large"]).memory_mb == 128
    with pytest.raises(EnvironmentLoadError, match=r"large: .*cpus=4096"):
        opened(tmp_path, cpus=4096.0)


def test_a_virtual_environment_that_no_sandbox_can_run_is_told(tmp_path):
    write_task(tmp_path / "tasks" / "one")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    with pytest.raises(EnvironmentLoadError, match=r"env\.local_venv .*venv/bin/python"):
        opened(tmp_path / "tasks", local_venv=str(tmp_path / "venv"))


def test_a_dockerfile_that_needs_an_image_names_its_line(tmp_path):
    for line, said in (
        ("RUN apt-get update && apt-get install -y jq", "local_skips"),
        ("RUN curl -O https://a.b/c", "network"),
        ("COPY --from=build /x /y", "elsewhere"),
        ("FROM debian AS second", "several stages"),
        ("COPY missing ./", "missing"),
        ("WORKDIR /usr/src", "folder of the system"),
        ("USER alice", "cannot be done"),
        ("RUN <<EOF\nx\nEOF", "several lines"),
    ):
        write_task(tmp_path / "asks", dockerfile=f"{DOCKERFILE}{line}\n")
        [task] = read_tasks(tmp_path)
        with pytest.raises(ConfigError, match=f"asks needs an image: .*{said}"):
            local_image(task.image, ())
        with pytest.raises(EnvironmentLoadError, match="asks needs an image"):
            opened(tmp_path)
    write_task(tmp_path / "asks", dockerfile=f"{DOCKERFILE}RUN pip install pytest\n")
    [task] = read_tasks(tmp_path)
    image = local_image(task.image, ("pip install",))
    assert (image.folder, image.environment["MARK"]) == ("/app", "yes")
    assert image.roots == {"/app", "/workspace"}


def test_the_user_of_an_image_is_that_of_its_last_stage():
    for text, wanted in {
        "FROM a\nUSER root\nUSER app": "app",
        "FROM a\nUSER app\nUSER 0": "",
        "FROM a AS One\nUSER app\nFROM --platform=x one": "app",
        "FROM a as one\nUSER app\nFROM b\nCOPY --from=one x y": "",
        "ARG V=1\nFROM a\nUSER 7:7\nRUN x": "7:7",
    }.items():
        assert user_of(text) == wanted, text


def test_an_image_is_named_by_what_it_is_built_of(tmp_path):
    write_task(tmp_path / "asks")
    [task] = read_tasks(tmp_path)
    context, tag = build_of(task.image, ())
    assert tag.startswith("telescope-harbor/asks:")
    assert build_of(task.image, ()) == (context, tag)
    assert build_of(task.image, ("one==1",))[1] != tag
    named = "[environment]\ndocker_image = 'org/image:1'\n"
    write_task(tmp_path / "asks", table=named)
    [task] = read_tasks(tmp_path)
    context, _ = build_of(task.image, ("one==1",))
    assert b"FROM org/image:1\n" in context
    assert b"pip install --no-cache-dir one==1" in context
    os.remove(tmp_path / "asks" / "environment" / "Dockerfile")
    assert b"FROM org/image:1\nCOPY . ./" in build_of(read_tasks(tmp_path)[0].image, ())[0]


def test_files_that_a_task_ignores_are_not_in_its_image(tmp_path):
    ignored = "# Not there.\n\nanswers/\n!answers/shown\n**/*.log\n/notes/one\nwords?\n[xy].csv\n"
    names = ("answers/1", "answers/shown", "a/b/c.log", "d.log", "notes/one", "words2", "x.csv")
    more = {".dockerignore": ignored, **dict.fromkeys((*names, "z.csv", "a/notes/one"), "1\n")}
    write_task(
        tmp_path,
        dockerfile="FROM x\nWORKDIR /app\nCOPY . .\nCOPY *.csv answers /data/\n",
        more={f"environment/{name}": text for name, text in more.items()},
    )
    [task] = read_tasks(tmp_path)
    shown = {
        *(".dockerignore", "Dockerfile", "a/notes/one", "answers/shown", "say.sh", "words"),
        "z.csv",
    }

    def files_in(packed: bytes) -> set[str]:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            return {one.name for one in tar if one.isfile()}

    assert files_in(build_of(task.image, ())[0]) == shown
    whole, some = [step.files for step in local_image(task.image, ()).steps if step.files]
    assert files_in(whole) == {f"app/{name}" for name in shown}
    assert files_in(some) == {"data/z.csv", "data/shown"}
    write_task(tmp_path, dockerfile="FROM x\nCOPY notes/one ./\n")
    with pytest.raises(ConfigError, match="notes/one, which is not in environment/"):
        local_image(read_tasks(tmp_path)[0].image, ())


@pytest.mark.slow
async def test_a_solution_and_nothing_are_told_apart(tmp_path):
    write_task(tmp_path / "one")
    write_task(tmp_path / "two", solution="echo 4 > count\n")
    write_task(tmp_path / "wide", tests="echo 1 > /logs/verifier/reward.txt\n", solution="")
    seen = []
    one, two, wide = await check_tasks({"id": str(tmp_path), **LOCAL}, 9, seen.append)
    assert seen == [one, two, wide]
    assert (one.solution, one.nothing, one.problems) == (1.0, 0.0, ())
    assert (two.solution, len(two.problems)) == (0.0, 1)
    assert two.problems[0].startswith("its solution earns 0 of 1; ")
    assert (wide.solution, wide.nothing) == (None, 1.0)
    assert wide.problems[0] == "it brings no solution/solve.sh"
    assert wide.problems[1].startswith("nothing at all earns 1 of 1; ")


REWARDS = [
    ('{"reward": 0.25, "part": 0.5, "is_good": true, "note": "x"}', "1", (0.25, {"part": 0.5})),
    ('{"part": 0.5}', "0.75", (0.75, {"part": 0.5})),
    ('{"reward": true}', "", None),
    ('{"reward": "1"}', "", None),
    ('{"reward": NaN}', "", None),
    ("[1]", "1", None),
    ("{", "1", None),
    ("", "much", None),
    ("", "inf", None),
    ("", "", None),
]


@pytest.mark.slow
async def test_the_reward_is_read_as_the_format_says(tmp_path):
    for index, (as_json, text, _) in enumerate(REWARDS):
        lines = [
            f"printf '%s' '{value}' > /logs/verifier/reward.{kind}\n"
            for kind, value in (("json", as_json), ("txt", text))
            if value
        ]
        write_task(tmp_path / f"r{index}", tests="".join(lines) or "exit 0\n", solution="")
    environment = opened(tmp_path)
    async with playing(environment) as play:
        for index, (_, _, wanted) in enumerate(REWARDS):
            rollout, _ = await play("done", index=index)
            if wanted is None:
                assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None), index
                assert rollout.error.startswith(f"SandboxError: r{index}: "), rollout.error
                assert rollout.tags["failed_in"] == "reward"
            else:
                others = {name: rollout.metrics[name] for name in wanted[1]}
                assert (rollout.reward, others) == wanted, rollout.error
                assert not {"is_good", "note"} & rollout.metrics.keys()


@pytest.mark.slow
async def test_an_agent_plays_in_the_folder_of_the_task_and_is_graded_by_its_tests(tmp_path):
    write_task(tmp_path / "one")
    async with playing(opened(tmp_path)) as play:
        look = "$ pwd; ls; cat out/seen; sh /workspace/say.sh; echo $WHERE; ls /tests"
        rollout, policy = await play(look, "$ echo 3 > count", "done")
        assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
        assert policy.asked[0] == (tmp_path / "one" / "instruction.md").read_text()
        assert policy.asked[1].split() == [
            "/app",
            "one",
            "out",
            "words",
            "3",
            "yes",
            "said",
            "/app",
        ]
        assert rollout.metrics["verifier_s"] > 0
        assert rollout.tags["task_digest"] == read_tasks(tmp_path)[0].digest
        # What the agent leaves where the reward is written counts for nothing, nor do helpers.
        stale = (
            "$ echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/helper; echo 5 > count"
        )
        rollout, _ = await play(stale, "done")
        assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 0.0), rollout.error


SPOILS = [
    "cd /logs/verifier; mkdir d; touch d/x; chmod 555 . d",
    "cd /logs/verifier; mkdir -p d/e; touch d/e/x; chmod 000 d/e d . /logs",
    "mkdir f; echo 1 > f/reward.txt; chmod 444 f/*; rmdir /logs/verifier; "
    "ln -s /app/f /logs/verifier; chmod 555 /logs",
    "rmdir /logs/verifier; touch /logs/verifier; chmod 555 /logs",
    "mkdir -p /tests/d; touch /tests/d/x; chmod 555 /tests/d /tests",
    "cd /; rm -rf /app/work",
    "cd /; rm -rf /app/work; touch /app/work",
    "cd /; rm -rf /app/work /app/notes; touch /app/work; ln -s /nowhere /app/notes",
    "chmod 000 .",
]


@pytest.mark.slow
async def test_what_an_agent_leaves_cannot_void_its_reward(tmp_path):
    lines = DOCKERFILE.replace("/app", "/app/work")
    table = TABLE.replace("256M", "64M").replace("timeout_sec = 30", "timeout_sec = 60")
    write_task(tmp_path / "one", dockerfile=lines, table=table)
    async with playing(opened(tmp_path)) as play:
        for spoils in SPOILS:
            rollout, _ = await play(f"$ {spoils}", "done")
            assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 0.0), (
                spoils,
                rollout.error,
            )


@pytest.mark.slow
async def test_limits_of_the_agent_are_outcomes_and_others_are_failures(tmp_path):
    write_task(tmp_path / "agent")
    slow = TABLE.replace("timeout_sec = 60.0", "timeout_sec = 0.5")
    write_task(tmp_path / "b-verifier", table=slow, tests=f"sleep 60\n{GRADE}")
    ill = f'{TABLE}[environment.healthcheck]\ncommand = "false"\ninterval_sec = 0\nretries = 2\n'
    write_task(tmp_path / "c-health", table=ill)
    write_task(tmp_path / "d-build", dockerfile=f"{DOCKERFILE}RUN false\n")
    for limit_s in (2.0, 10.0, 60.0):
        async with playing(opened(tmp_path, agent_timeout_s=limit_s)) as play:
            rollout, policy = await play("$ echo 3 > count", "$ sleep 600", "done")
        if len(policy.asked) == 2:
            break  # The first command has ended, however busy this machine is.
    assert (rollout.stop_reason, rollout.reward) == (StopReason.TIMEOUT, 1.0), rollout.error
    assert rollout.tags["time_limit"] == f"agent_timeout_s = {limit_s:g} s"
    environment = opened(tmp_path)
    [step] = environment.tasks["agent"].steps
    assert (environment._agent_s(step), environment._agent_limit(step)) == (
        30.0,
        "agent.timeout_sec",
    )
    async with playing(opened(tmp_path)) as play:
        for index, said in ((1, "did not end by itself"), (2, "failed 2 times"), (3, "`false`")):
            rollout, _ = await play("done", index=index)
            assert rollout.status is RolloutStatus.FAILED
            assert rollout.error.startswith("SandboxError: "), rollout.error
            assert said in rollout.error


@pytest.mark.slow
def test_commands_link_and_check_a_folder(tmp_path, home, monkeypatch):
    asks = f'{TABLE}[environment.env]\nKEY = "${{HARBOR_KEY}}"\n'
    write_task(tmp_path / "tasks" / "one", table=asks)
    settings = json.dumps({**LOCAL, "local_skips": ["pip install"]})
    words = ("env", "link", "harbor:tasks", "--settings", settings)
    done = telescope(*words, folder=tmp_path)
    assert done.returncode == 3
    assert "one needs the variable HARBOR_KEY" in done.stderr
    monkeypatch.setenv("HARBOR_KEY", "not to be seen")
    done = telescope(*words, "--secret", "HARBOR_KEY", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not to be seen" not in done.stdout + done.stderr
    done = telescope("env", "validate", "harbor:tasks", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {"task": "one", "solution": 1.0, "nothing": 0.0, "problems": []}
    ]
    done = telescope("env", "validate", "harbor:tasks", "--strict", folder=tmp_path)
    assert done.returncode == 2
    assert "--examples" in done.stderr
    write_task(tmp_path / "tasks" / "two", table="[environment]\ngpus = 2\n")
    done = telescope("env", "link", "harbor:tasks", "--settings", settings, folder=tmp_path)
    assert done.returncode == 3
    assert "two needs GPUs" in done.stderr


WITH_FILES = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward

class Plain(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=f"{split}/1", prompt="x")])

    @reward
    def right(self, completion):
        return 1.0

class Files(Plain):
    def task_files(self, example):
        return {
            "instruction.md": "Write 1 to `x`.",
            "environment/sub/empty": "",
            "tests/test.sh": "[ -e sub/empty ] && cat x > /logs/verifier/reward.txt || true",
            "solution/solve.sh": "echo 1 > x",
        }

class Partly(Plain):
    def task_files(self, example):
        return {"instruction.md": "x"} if example.id == "eval/1" else None
"""


@pytest.mark.slow
async def test_examples_of_ours_are_written_as_tasks_that_play(tmp_path):
    (tmp_path / "ours.py").write_text(WITH_FILES)
    words = ("env", "export", "./ours.py:Files", "--output", "out")
    done = telescope(*words, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tasks"]) == 2
    checks = await check_tasks({"id": str(tmp_path / "out"), **LOCAL}, 9, lambda check: None)
    # Nothing was written to `x`, so the empty reward file is a failure and no 0.
    assert [check.solution for check in checks] == [1.0, 1.0]
    assert [check.nothing for check in checks] == [None, None]
    done = telescope(*words, folder=tmp_path)
    assert (done.returncode, "not empty" in done.stderr) == (2, True)
    for name, said in (
        ("Plain", "cannot be exported: it has no method"),
        ("Partly", "gives no files"),
    ):
        done = telescope("env", "export", f"./ours.py:{name}", "-o", name, folder=tmp_path)
        assert done.returncode == 3
        assert said in done.stderr
        assert not (tmp_path / name).exists()
    assert telescope("env", "export", "x", "--to", "harbr", folder=tmp_path).returncode == 2


@pytest.mark.slow
async def test_tasks_are_built_and_played_in_containers(tmp_path, monkeypatch):
    table = TABLE + 'network_mode = "no-network"\n'
    lines = (
        f"FROM {IMAGE}\nWORKDIR /srv/task\nENV MARK=yes\nCOPY words ./\nRUN echo $MARK > /seen\n"
    )
    grade = GRADE.replace("/app/count", "count").replace("tr -d", "cat /seen > /dev/null; tr -d")
    write_task(tmp_path / "one", table=table, dockerfile=lines, tests=grade)
    # Its verifier has an image and a sandbox of its own, and one step before the other.
    elsewhere = "artifacts = ['count']\n[verifier.environment]\nmemory = '256M'\n"
    steps = "[[steps]]\nname = 'a'\nmin_reward = 1.0\n[[steps]]\nname = 'b'\n"
    judge = "[ ! -e /seen ] && tr -d ' ' < /srv/task/count > /logs/verifier/reward.txt || exit 1\n"
    write_task(
        tmp_path / "two",
        table=f"{elsewhere}{steps}",
        # Its programs run as another user, whose home is not that of root.
        dockerfile=(
            f"{lines}RUN mkdir -p /logs/agent && chmod 777 .\n"
            "RUN echo 'u:x:7:7::/srv:' > /etc/passwd\nUSER 7:7\n"
        ),
        tests=judge,
        solution="echo $(id -u)$HOME | sed s,7/srv,1, > count\n",
        more={
            "tests/Dockerfile": f"FROM {IMAGE}\nCOPY . /tests/\n",
            "steps/a/instruction.md": "Write 1 to `count`.",
            "steps/b/instruction.md": "Leave it as it is.",
        },
    )
    monkeypatch.setattr(HarborEnvironment, "allowed_hosts", OnLoopback)
    with (
        # The path of a socket must be short, which that of tmp_path is not.
        tempfile.TemporaryDirectory(prefix="podman-") as folder,
        podman_service(Path(folder)) as address,
    ):
        settings = {"id": str(tmp_path), **HARNESS, "sandbox": "docker", "docker_url": address}
        async with web() as (port, _):
            write_task(
                tmp_path / "wide",
                table="[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['files.test']\n",
                dockerfile=f"FROM {IMAGE}\nWORKDIR /srv\nENV PORT={port}\nCOPY tries.py ./\n",
                solution="python3 tries.py > tried\n",
                tests=(
                    "python3 - > /logs/verifier/reward.txt <<END\nimport json\n"
                    f"print(int(json.load(open('tried')) == {TRIED}))\nEND\n"
                ),
                more={"environment/tries.py": TRIES},
            )
            check, steps, wide = await check_tasks(settings, 9, lambda check: None)
        assert wide.solution == 1.0, wide.problems
        assert (check.solution, check.nothing, check.problems) == (1.0, 0.0, ())
        # Without the file there is no number, which is a failure and no 0.
        assert (steps.solution, steps.nothing) == (1.0, None), steps.problems
        async with playing(HarborEnvironment.from_settings(settings)) as play:
            rollout, policy = await play("$ pwd; id -u; cat /seen", "$ echo 3 > count", "done")
        assert policy.asked[1].split() == ["/srv/task", "0", "yes"]
        assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
        with pytest.raises(EnvironmentLoadError, match=r"one: .*cpus"):
            HarborEnvironment.from_settings({**settings, "cpus": 4096.0})
    with pytest.raises(ConfigError, match="docker_url"):
        HarborEnvironment.from_settings(settings)


SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {"content": [{"type": "text", "text": asked["params"]["arguments"]["of"][::-1]}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
USES_SERVER = """
import json, subprocess, sys
server = json.load(open(sys.argv[1]))["mcpServers"]["turner"]
words = [server["command"], *server["args"]]
asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
         "params": {"name": "turn", "arguments": {"of": "eerht"}}}
done = subprocess.run(words, input=json.dumps(asked) + "\\n", capture_output=True, text=True)
text = json.loads(done.stdout)["result"]["content"][0]["text"]
open("count", "w").write("3" if text == "three" else done.stderr)
"""


@pytest.mark.slow
async def test_an_agent_is_given_the_servers_of_its_task(tmp_path, monkeypatch):
    stdio = (
        "name = 'turner'\ntransport = 'stdio'\ncommand = 'python3'\nargs = ['/workspace/turn.py']"
    )
    remote = "name = 'far'\nurl = 'http://x'\nheaders = {Authorization = 'Bearer ${FAR_KEY}'}"
    table = "".join(f"[[environment.mcp_servers]]\n{one}\n" for one in (stdio, remote))
    write_task(
        tmp_path / "one",
        table=f"{TABLE}{table}",
        dockerfile=f"{DOCKERFILE}COPY turn.py /workspace/\n",
        more={"environment/turn.py": SERVER},
    )
    with pytest.raises(EnvironmentLoadError, match="one needs the variable FAR_KEY"):
        opened(tmp_path)
    monkeypatch.setenv("FAR_KEY", "k1")
    with pytest.raises(EnvironmentLoadError, match=r"one has MCP servers.*mcp_config"):
        opened(tmp_path)
    options = {
        "argv": [
            "sh",
            "-c",
            "python3 /tmp/agent/use.py {mcp_config} && python3 /tmp/agent/agent.py x",
        ],
        "files": {"/tmp/agent/use.py": USES_SERVER, "/tmp/agent/agent.py": AGENT},
    }
    environment = opened(tmp_path, harness_options=options)
    [_, far] = environment.tasks["one"].image.table.mcp_servers
    assert far.entry() == {
        "type": "sse",
        "url": "http://x",
        "headers": {"Authorization": "Bearer k1"},
    }
    async with playing(environment) as play:
        rollout, _ = await play("done")
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
