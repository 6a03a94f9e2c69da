"""Real worker processes, and what happens when they die, hang, grow or are left alone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from tests.ports import free_port
from tests.processes import command_of
from wire_cases import IMPATIENT, request
from worker_toys import Holds

from telescope_core.base.retries import MAX_LOST, play_with_attempts
from telescope_core.chat.client import ChatClient
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import (
    ConfigError,
    EnvironmentLoadError,
    EnvironmentProcessError,
    RolloutCrashError,
)
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.in_process import InProcessEnvironment
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings, StageDeadlines
from telescope_core.processes.frames import ProtocolError
from telescope_core.protocols import EnvironmentLocation
from telescope_core.scripted import ScriptedClient
from telescope_core.types import LOST_TO, Group, RolloutStatus, Sampling, Split, StopReason

pytestmark = pytest.mark.slow
MEBIBYTE = 2**20


def scripted(reply: str = "0"):
    return ScriptedClient([reply]).policy("r")


class Held:
    """A policy that answers when it is let go."""

    endpoint = None

    def __init__(self):
        self.num_asked = 0
        self.let_go = asyncio.Event()

    async def complete(self, messages, sampling, *, tools=()):
        self.num_asked += 1
        await self.let_go.wait()
        return await scripted(messages[-1].content).complete(messages, sampling)


async def until(condition, what: str) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (other processes have no events)
            await asyncio.sleep(0.01)
    assert condition(), what


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def worker_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "telescope_core.processes.worker" in " ".join(command_of(child))
    ]


@pytest.fixture(autouse=True)
async def leaves_nothing():
    """Every test ends with as many processes, descriptors and tasks as it began with."""
    before = num_open_files()
    yield
    await until(lambda: not worker_processes(), "every worker process has ended")
    await until(lambda: num_open_files() <= before, "every descriptor is closed")


async def test_constructors_run_on_the_main_thread_and_leave_our_signals(workers):
    pool = workers("TakesSignals")
    rollout = await pool.play(request(), scripted())
    assert (rollout.error, rollout.reward) == (None, 1.0)
    os.kill(int(rollout.tags["pid"]), signal.SIGTERM)
    await until(lambda: is_gone(int(rollout.tags["pid"])), "the worker to end by SIGTERM")


async def test_a_rollout_has_one_id_in_play_score_and_score_group(workers):
    pool = workers("Remembers")
    played = [await pool.play(request(rollout=i), scripted(str(i))) for i in range(3)]
    assert [one.rollout_id for one in played] == [request(rollout=i).rollout_id for i in range(3)]
    group = Group(id=played[0].group_id, environment="toy", example_id="one", rollouts=(*played,))
    scored = await pool.score_group(Split.TRAIN, 0, group)
    assert [one.reward for one in scored.rollouts] == [2.0] * 3


async def test_a_killed_worker_loses_its_rollouts_alone(workers, tmp_path):
    pool = workers("Suicidal", num_workers=2, log_folder=tmp_path / "logs")
    await pool.describe()
    await until(lambda: pool.stats()["workers"] == 2, "both workers")
    held = Held()
    tasks = [asyncio.create_task(pool.play(request(i, rollout=i), held)) for i in range(2, 12)]
    await until(lambda: held.num_asked == 10, "all ten to wait for the policy")
    victim = pool._seats[0].worker
    pid = int(victim.label.rpartition("pid ")[2].rstrip(")"))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: sum(task.done() for task in tasks) == 5, "five lost rollouts")
    held.let_go.set()
    rollouts = await asyncio.gather(*tasks)
    assert [rollout.index for rollout in rollouts] == list(range(2, 12))
    lost = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    assert len(lost) == 5
    for rollout in lost:
        assert rollout.reward is None
        assert rollout.status_reason == "EnvironmentProcessError"
        assert f"pid {pid}) is gone" in rollout.error
        assert "5 rollouts lost with it" in rollout.error
        assert "SIGKILL" in rollout.error
        assert "its log is" not in rollout.error, "it printed nothing"
    kept = [rollout for rollout in rollouts if rollout.status is RolloutStatus.KEPT]
    assert [rollout.reward for rollout in kept] == [1.0] * 5
    again = await pool.play(request(lost[0].index), scripted(str(lost[0].index)))
    assert again.reward == 1.0
    assert pool.stats()["restarts"] == 1


async def test_last_words_and_log_are_in_the_error(workers, tmp_path):
    pool = workers("Suicidal", log_folder=tmp_path / "logs")
    played = await pool.play(request(1), scripted())
    assert played.tags["failed_in"] == "process"
    assert "these are my last words" in played.error
    log = tmp_path / "logs" / "environment_output-worker_toys-Suicidal-0.jsonl"
    assert str(log) in played.error
    assert "these are my last words" in log.read_text()


async def test_a_worker_that_always_dies_is_given_up(workers):
    pool = workers("Suicidal", max_restarts=1)
    for index in range(2):
        played = await pool.play(request(1, rollout=index), scripted())
        assert played.status is RolloutStatus.FAILED
    with pytest.raises(EnvironmentProcessError, match=r"gave up after 2 attempts(.|\n)*last words"):
        await pool.play(request(1, rollout=2), scripted())
    with pytest.raises(EnvironmentProcessError):
        await pool.health()


async def test_a_hang_is_named_and_the_others_are_infrastructure(workers):
    pool = workers("Hangs", deadlines=IMPATIENT)
    held = Held()
    innocent = asyncio.create_task(pool.play(request(2), held))
    await until(lambda: held.num_asked == 1, "the innocent rollout to wait")
    culprit = await pool.play(request(1), scripted("1"))
    assert culprit.stop_reason is StopReason.TIMEOUT
    assert culprit.status is RolloutStatus.FAILED
    assert "worker_toys.py:" in culprit.error
    assert "in env_step" in culprit.error
    assert "await it, or run it in a thread" in culprit.error
    lost = await innocent
    assert lost.status_reason == "EnvironmentProcessError"
    assert "hangs in rollout g1/0" in lost.error
    held.let_go.set()
    assert (await pool.play(request(2), held)).reward == 1.0


async def attempts(pool, index: int, *, deadline_s: float = 30.0):
    """Play one rollout as training does, with a policy of its own for each attempt."""
    asked = request(index, deadline_s=deadline_s)
    return await play_with_attempts(lambda _: pool.play(asked, scripted(str(index))))


def _rare(*case: str):
    return pytest.param(*case, marks=pytest.mark.nightly)


CULPRITS = [
    ("pattern", "reward", "TimeoutError", "reward Holds.holds"),
    ("number", "reward", "TimeoutError", "reward Holds.holds"),
    ("pattern", "play", "TimeoutError", "play Holds.play"),
    _rare("pattern", "setup", "TimeoutError", "setup Holds.prepares"),
    _rare("pattern", "prompt", "TimeoutError", "Holds.format_prompt"),
    ("exit", "reward", "RolloutCrashError", "reward Holds.holds"),
    _rare("exit", "play", "RolloutCrashError", "play Holds.play"),
    ("crash", "reward", "RolloutCrashError", "reward Holds.holds"),
]


@pytest.mark.parametrize(("how", "where", "kind", "what"), CULPRITS)
async def test_code_that_holds_or_ends_its_worker_costs_its_own_rollout(
    workers, how, where, kind, what
):
    told: list[str] = []
    pool = workers("Holds", settings={"how": how, "where": where})
    pool.on_replaced = told.append
    await pool.describe()
    rollouts = await asyncio.gather(
        attempts(pool, 1, deadline_s=2.5), *(attempts(pool, index) for index in range(2, 8))
    )
    culprit, *others = rollouts
    assert (culprit.status_reason, culprit.attempt) == (kind, 1)
    assert f"{what} (" in culprit.error
    assert "worker_toys.py:" in culprit.error
    assert [one.reward for one in others] == [1.0] * 6
    await pool.health()
    assert pool.stats()["restarts"] == 1
    assert len(told) == 1
    assert what in told[0]
    assert culprit.rollout_id in told[0]


async def test_a_rollout_that_may_have_ended_its_worker_is_played_alone(workers):
    pool = workers("Holds", settings={"how": "kill"}, max_restarts=1)
    await pool.describe()
    pool.on_replaced = lambda why: None
    culprit, *others = await asyncio.gather(*(attempts(pool, index) for index in range(1, 8)))
    assert culprit.status_reason == "EnvironmentProcessError"
    assert "1 rollout lost with it" in culprit.error
    assert culprit.attempt == 1 + MAX_LOST
    assert [one.reward for one in others] == [1.0] * 6
    assert {one.attempt for one in others} <= {1, 2}


async def test_a_group_reward_that_holds_its_worker_is_asked_once(workers):
    deadlines = replace(IMPATIENT, hang_s=4.0)
    pool = workers("Holds", settings={"where": "group"}, deadlines=deadlines)
    played = await pool.play(request(1), scripted("1"))
    group = Group(id="g1", environment="toy", example_id="1", rollouts=(played,))
    with pytest.raises(RolloutCrashError, match=r"group_reward Holds\.holds_all"):
        await pool.score_group(Split.TRAIN, 1, group)
    await pool.health()
    assert pool.stats()["restarts"] == 1


@pytest.mark.nightly
async def test_an_eval_scores_everything_that_ends_no_worker_of_many_that_do(workers):
    pool = workers("KillsOften", max_restarts=20)
    settings = EvalSettings(num_examples=12, rollouts=1, sampling=Sampling(max_tokens=4))
    result = await run_eval(pool, ScriptedClient(lambda messages: messages[-1].content), settings)
    assert (result.num_scored, result.num_failed) == (8, 4)
    assert result.failures == {"EnvironmentProcessError": 4}


async def test_an_eval_scores_what_does_not_end_its_worker(workers):
    pool = workers("Holds", settings={"how": "exit"})
    settings = EvalSettings(num_examples=4, rollouts=1, sampling=Sampling(max_tokens=4))
    result = await run_eval(pool, ScriptedClient(lambda messages: messages[-1].content), settings)
    assert (result.num_scored, result.num_failed) == (3, 1)
    assert result.failures == {"RolloutCrashError": 1}


HERE = """
import asyncio, sys
sys.path[:0] = sys.argv[1:3]
from wire_cases import request
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.scripted import ScriptedClient

async def main():
    settings = {"how": sys.argv[3], "where": sys.argv[4]}
    processes = ProcessSettings(isolation=Isolation.NONE)
    client = open_environment("worker_toys:Holds", settings, processes)
    asked = [request(index, deadline_s=1.0) for index in range(4)]
    plays = [client.play(one, ScriptedClient(["0"]).policy("r")) for one in asked]
    await asyncio.gather(*plays)
    await client.close()

asyncio.run(main())
"""


def test_a_class_of_the_program_itself_is_played_there_alone(monkeypatch):
    """As of a cell of a notebook: another process would run the program again."""
    monkeypatch.setattr(sys.modules["__main__"], "Holds", Holds, raising=False)
    assert isinstance(open_environment("__main__:Holds"), InProcessEnvironment)
    apart = ProcessSettings(isolation=Isolation.PROCESS)
    with pytest.raises(ConfigError, match=r"notebook.*save it in a file"):
        open_environment("__main__:Holds", {}, apart)


@pytest.mark.parametrize(
    ("how", "where", "said"),
    [
        ("pattern", "reward", "reward Holds.holds ("),
        ("sleep", "play", "play Holds.play ("),
        ("exit", "reward", "reward Holds.holds ("),
        ("none", "reward", ""),
    ],
)
async def test_code_that_holds_a_driver_is_named_by_another_process(how, where, said):
    toys = Path(__file__).parent / "toys"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", HERE, str(toys), str(Path(__file__).parents[3]), how, where),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        shown = (await started.communicate())[1].decode()
    assert (started.returncode == 0) is (how == "none")
    assert ("error: " in shown) is (how != "none")
    assert said in shown
    assert how == "none" or "of rollout g1/0 (example 1 of worker_toys:Holds)" in shown


async def test_innocent_rollouts_are_played_again_as_often_as_it_takes():
    lost = request().rollout("toy")
    lost = replace(
        lost,
        status=RolloutStatus.FAILED,
        status_reason="EnvironmentProcessError",
        tags={LOST_TO: "g1/0"},
    )
    outcomes = [lost] * (2 * MAX_LOST) + [replace(lost, status=RolloutStatus.KEPT, reward=1.0)]

    async def play(attempt: int):
        return outcomes[attempt - 1]

    assert (await play_with_attempts(play)).attempt == 2 * MAX_LOST + 1


async def test_a_frozen_process_is_noticed(workers):
    pool = workers("Echo", deadlines=IMPATIENT)
    held = Held()
    task = asyncio.create_task(pool.play(request(3), held))
    await until(lambda: held.num_asked == 1, "the rollout to wait")
    frozen = [process for process in worker_processes() if process.children() == []]
    frozen[0].suspend()
    lost = await task
    assert "sent nothing for" in lost.error
    assert "it was playing g3/0" in lost.error
    assert lost.status_reason == "EnvironmentProcessError"


async def test_a_host_that_stood_still_does_not_blame_its_workers(workers):
    pool = workers("Echo", deadlines=IMPATIENT)
    held = Held()
    task = asyncio.create_task(pool.play(request(3), held))
    await until(lambda: held.num_asked == 1, "the rollout to wait")
    time.sleep(2 * IMPATIENT.hang_s)  # noqa: ASYNC251 (that is the point)
    await asyncio.sleep(0.6)
    held.let_go.set()
    assert (await task).reward == 1.0
    assert pool.stats()["restarts"] == 0


async def test_a_reward_that_raises_is_a_failure_of_the_reward(workers):
    played = await workers("BadReward").play(request(), scripted())
    assert played.error.startswith("ZeroDivisionError: there is nothing to divide by")
    assert (played.tags["failed_in"], played.reward) == ("reward", None)


CALLS = '<tool_call>{{"name": "{}", "arguments": {{{}}}}}</tool_call>'


async def test_a_tool_that_never_returns_meets_the_deadline(workers):
    pool = workers("EndlessTool")
    stuck = [
        pool.play(request(0, rollout=i, deadline_s=1), scripted(CALLS.format("wait", "")))
        for i in range(3)
    ]
    well = ScriptedClient([CALLS.format("double", '"number": 2'), "0"]).policy("r")
    *timed_out, fine = await asyncio.gather(*stuck, pool.play(request(0), well))
    assert {rollout.stop_reason for rollout in timed_out} == {StopReason.TIMEOUT}
    assert {rollout.reward for rollout in timed_out} == {None}
    assert fine.reward == 1.0


async def test_threads_that_never_return_cost_their_worker(workers):
    pool = workers("EndlessReward", max_stuck_threads=2)
    timed_out = await asyncio.gather(
        *(pool.play(request(1, rollout=i, deadline_s=0.5), scripted("1")) for i in range(3))
    )
    assert {rollout.stop_reason for rollout in timed_out} == {StopReason.TIMEOUT}
    assert {rollout.reward for rollout in timed_out} == {None}
    await until(lambda: pool._seats[0].worker.is_retired, "the worker to be replaced")
    assert (await pool.play(request(0), scripted())).reward == 1.0
    assert pool.stats()["restarts"] == 1


async def test_out_of_memory_ends_the_rollout_or_the_worker(workers):
    pool = workers("Hungry", memory_limit_bytes=256 * MEBIBYTE)
    at_once = await pool.play(request(1), scripted("1"))
    assert (at_once.status_reason, at_once.reward) == ("MemoryError", None)
    assert (await pool.play(request(3), scripted("3"))).reward == 1.0
    grown = await pool.play(request(2), scripted("2"))
    assert (grown.status_reason, grown.reward) == ("EnvironmentProcessError", None)
    assert "above its limit of 256 MiB" in grown.error
    assert "while it was playing g2/0" in grown.error
    assert (await pool.play(request(3), scripted("3"))).reward == 1.0


async def test_a_malformed_reply_of_the_model_server_is_the_endpoint_s_failure(workers):
    async def nonsense(_):
        return web.json_response({"choices": "none"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", nonsense)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = ChatClient(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")
    try:
        played = await workers().play(request(), client.policy("r"))
    finally:
        await client.close()
        await runner.cleanup()
    assert played.status_reason == "EndpointError"
    assert played.reward is None


async def test_trouble_with_a_judge_in_a_worker_is_shown_by_the_host(workers):
    shown = asyncio.Event()
    lines = []

    def show(line: str) -> None:
        lines.append(line)
        shown.set()

    async def judge(_):
        if not lines:
            return web.Response(status=503, text="warming up")
        said = {"role": "assistant", "content": '{"reason": "wet", "score": 1}'}
        return web.json_response({"choices": [{"message": said, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    pool = workers("Graded", settings={"judge": {"base_url": address, "model": "grader"}})
    try:
        with showing_troubles(show):
            played = await pool.play(request(deadline_s=300), scripted("Waves."))
            await asyncio.wait_for(shown.wait(), 120)
    finally:
        await runner.cleanup()
    assert played.reward == 1.0
    assert played.metrics["judge/http_retries"] >= 1
    assert lines[0].startswith("environment process 0 of worker_toys:Graded ")
    assert "answered 503: warming up" in lines[0]


async def test_programs_that_environment_code_started_end_with_it(workers):
    pool = workers("Parent")
    played = await pool.play(request(), scripted())
    child = int(played.tags["child"])
    assert not is_gone(child)
    os.kill(int(played.tags["pid"]), signal.SIGKILL)
    await until(lambda: is_gone(child), "the program of a killed worker to end")
    async with asyncio.timeout(120):
        # What is asked of the killed worker before its end is noticed comes back as a failure.
        while "child" not in (played := await pool.play(request(), scripted())).tags:
            assert "EnvironmentProcessError" in str(played.error)
    await pool.close()
    await until(lambda: is_gone(int(played.tags["child"])), "the program to end at close")


HOST = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from wire_cases import request
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.scripted import ScriptedClient

async def main():
    processes = ProcessSettings(isolation=Isolation.PROCESS, num_workers=2)
    pool = open_environment("worker_toys:Parent", {}, processes)
    played = await pool.play(request(), ScriptedClient(["0"]).policy("r"))
    print(played.tags["pid"], played.tags["child"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_outlives_a_host_that_was_killed():
    toys = str(Path(__file__).parent / "toys")
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOST, toys, stdout=subprocess.PIPE
    )
    pids = [int(text) for text in (await asyncio.wait_for(host.stdout.readline(), 120)).split()]
    family = psutil.Process(host.pid).children(recursive=True)
    assert len(family) >= 4
    host.kill()
    await host.wait()
    host._transport.close()
    await until(lambda: all(map(is_gone, [*pids, *(one.pid for one in family)])), "all to end")


async def test_only_declared_secrets_reach_a_worker(workers, monkeypatch):
    for name in ("TOY_SECRET", "TOY_TOKEN", "TELESCOPE_WORKER_TOKEN"):
        monkeypatch.setenv(name, f"the {name}")
    played = await workers("Nosy").play(request(), scripted())
    assert played.tags["TOY_SECRET"] == "the TOY_SECRET"
    assert (played.tags["TOY_TOKEN"], played.tags["TELESCOPE_WORKER_TOKEN"]) == ("", "")
    assert played.tags["PATH"] == os.environ["PATH"]


async def test_a_thousand_cancelled_rollouts_are_each_answered_once(workers):
    pool = workers(num_workers=2)
    await pool.describe()
    held = Held()
    tasks = [asyncio.create_task(pool.play(request(i % 40, rollout=i), held)) for i in range(1000)]
    await until(lambda: held.num_asked >= 300, "a part of them to reach the policy")
    for index in range(1000):
        await pool.cancel(f"g{index % 40}/{index}")
    rollouts = await asyncio.gather(*tasks)
    assert [rollout.index for rollout in rollouts] == list(range(1000))
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.CANCELLED}
    assert pool.stats()["in_flight"] == 0
    assert (await pool.play(request(5), scripted("5"))).reward == 1.0


async def test_stats_tell_how_the_workers_are(workers):
    pool = workers(num_workers=2)
    await asyncio.gather(*(pool.play(request(i), scripted()) for i in range(20)))
    await until(lambda: pool.stats()["memory_bytes"] > 0, "a beat")
    stats = pool.stats()
    assert 10 * MEBIBYTE < stats["memory_bytes"] < 500 * MEBIBYTE
    assert stats["workers"] >= 1
    assert (stats["restarts"], stats["in_flight"], stats["stuck_threads"]) == (0, 0, 0)
    await pool.health()


async def test_what_cannot_be_loaded_is_said_as_in_process(workers):
    with pytest.raises(ConfigError, match=r"sizes.*'size'"):
        await workers(settings={"sizes": 3}).describe()
    with pytest.raises(EnvironmentLoadError, match="worker_toys:Missing"):
        await workers("Missing").describe()
    pool = open_environment("nowhere:X", {}, ProcessSettings(isolation=Isolation.PROCESS))
    with pytest.raises(EnvironmentLoadError, match="'nowhere'"):
        await pool.describe()
    await pool.close()


@pytest.fixture
def broken_interpreter(tmp_path, monkeypatch):
    """Return a function that locates the toy behind a program which is no worker."""

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\n{script}")
        path.chmod(0o755)
        location = EnvironmentLocation(
            id="acme/toy", version="1", factory="worker_toys:Echo", interpreter=str(path)
        )
        monkeypatch.setattr("telescope_core.open.locate_environment", lambda name: location)

    return use


GARBAGE = """
import os, sys, time
descriptor = int(sys.argv[sys.argv.index("--fd") + 1])
os.write(descriptor, b"\\x00\\x00\\x00\\x02hi")
time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("script", "start_s", "facts"),
    [
        (GARBAGE, 60, ["malformed", "2 bytes"]),
        ("raise SystemExit('telescope-core is not installed here')", 60, ["exit code is 1"]),
        ("import time; time.sleep(600)", 1, ["greeting", "1 s"]),
    ],
)
async def test_a_program_that_is_no_worker_is_told_apart(
    broken_interpreter, script, start_s, facts
):
    broken_interpreter(script)
    deadlines = StageDeadlines(start_s=start_s, close_s=0.2)
    pool = open_environment("toy", {}, ProcessSettings(deadlines=deadlines, max_restarts=0))
    try:
        with pytest.raises(EnvironmentProcessError) as refused:
            await pool.describe()
        assert all(fact in str(refused.value) for fact in facts), refused.value
    finally:
        await pool.close()


TOKEN = "a token of the right length"


@pytest.fixture
async def listening(monkeypatch):
    """The address of a worker that listens on TCP, as a person starts it."""
    environ = {**os.environ, "TELESCOPE_WORKER_TOKEN": TOKEN}
    environ["PYTHONPATH"] = str(Path(__file__).parent / "toys")
    command = ["-m", "telescope_core.processes.worker", "worker_toys:Nosy"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--listen", "127.0.0.1:0"), env=environ, stdout=subprocess.PIPE
    )
    line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
    assert line.startswith("serving worker_toys:Nosy 0 on 127.0.0.1:")
    yield line.split()[-1]
    process.terminate()
    await process.wait()
    process._transport.close()


async def test_a_worker_elsewhere_needs_the_token_and_serves_the_next_host(listening, monkeypatch):
    processes = ProcessSettings(addresses=(listening,), max_restarts=0)
    with pytest.raises(ConfigError, match="set TELESCOPE_WORKER_TOKEN"):
        open_environment("worker_toys:Nosy", {}, processes)
    monkeypatch.setenv("TELESCOPE_WORKER_TOKEN", "not the token of that worker")
    stranger = open_environment("worker_toys:Nosy", {}, processes)
    with pytest.raises(ProtocolError, match="the token is wrong"):
        await stranger.describe()
    await stranger.close()
    monkeypatch.setenv("TELESCOPE_WORKER_TOKEN", TOKEN)
    monkeypatch.setenv("TOY_SECRET", "stays here")
    for _ in range(2):
        pool = open_environment("worker_toys:Nosy", {"size": 7}, processes)
        assert (await pool.describe()).num_examples[Split.TRAIN] == 7
        played = await pool.play(request(3), scripted("3"))
        assert played.reward == 1.0
        # Secrets do not travel in the clear, and the code cannot see the token.
        assert (played.tags["TOY_SECRET"], played.tags["TELESCOPE_WORKER_TOKEN"]) == ("", "")
        await pool.close()


async def test_a_worker_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setenv("TELESCOPE_WORKER_TOKEN", TOKEN)
    address = f"127.0.0.1:{free_port()}"
    processes = ProcessSettings(addresses=(address,), max_restarts=0)
    pool = open_environment("worker_toys:Echo", {}, processes)
    with pytest.raises(EnvironmentProcessError) as refused:
        await pool.describe()
    await pool.close()
    assert address in str(refused.value)
