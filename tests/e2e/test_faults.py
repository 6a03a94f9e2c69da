"""Kill -9 in mid-run: the error names what died, the run folder opens, no process stays."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pandas
import psutil
import pytest
from tests.ports import free_port
from tests.processes import command_of, listening_hosts
from tests.ui.browsing import require_shown

from telescope_core.errors import ProcessDiedError
from telescope_core.evals import EvalFolder
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.eval_points import EvalPointState
from telescope_core.records.servers import ServerRole, ServerState
from telescope_core.types import Sampling
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Request
from telescope_train.inference.server import (
    ENGINE_THREAD_VARIABLE,
    ServerProcess,
    ServerSettings,
    running,
)

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE, environment, finish, train_command

pytestmark = pytest.mark.engine

DEADLINE_S = 240
LONG_RUN = """
[run]
name = "victim"
number_of_steps = 5000
[trainer]
learning_rate = 1e-4
seq_len = 512
[ray]
max_trainer_restarts = 0
"""


@contextmanager
def training(
    place: Path,
    model: Path,
    port: int,
    settings: Mapping[str, str] = {},
    *,
    more: str = "",
    **variables: str,
) -> Iterator[subprocess.Popen[str]]:
    """Start a long run in a process of its own; whatever is left of it is ended.

    `more`: settings over all others.
    """
    (place / "more.toml").write_text(more)
    process = subprocess.Popen(
        [*train_command(place, model, LONG_RUN + in_toml(settings), port=port), "more.toml"],
        cwd=place,
        env=environment(variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started = [psutil.Process(process.pid)]
    try:
        until(lambda: num_steps(place) >= 2 or process.poll() is not None, "two steps")
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        started += started[0].children(recursive=True)
        yield process
        until(lambda: not alive(started), "every process of the run to end")
    finally:
        for one in alive(started):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def in_toml(inference: Mapping[str, str]) -> str:
    lines = [f"{name} = {value}" for name, value in inference.items()]
    return "\n".join(["[inference]", *lines, ""])


def until(condition, what: str) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.2)


def num_steps(place: Path) -> int:
    metrics = place / "runs" / "victim" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def descendants(driver: int) -> list[psutil.Process]:
    return psutil.Process(driver).children(recursive=True)


def require_only_what_the_page_says_listens(driver: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "several-nodes.md").read_text()
    _, _, section = page.partition("### On a cluster of the run's own")
    first_cells = [row.split("|")[1] for row in section.split("\n") if row.startswith("|")]
    named = [name for cell in first_cells for name in re.findall(r"`([\w.:]+)`", cell)]
    assert len(named) >= 8
    for process in [psutil.Process(driver), *descendants(driver)]:
        line, hosts = " ".join(command_of(process)), listening_hosts(process)
        if "multiprocessing.spawn" in line:
            # An engine that did not get a title of its own goes by the name of its server.
            with suppress(psutil.NoSuchProcess):
                line += " of " + " ".join(command_of(psutil.Process(process.ppid())))
        assert hosts <= {"127.0.0.1"}, f"{line} listens on {hosts}"
        assert not hosts or any(name in line for name in named), f"{line} is not in the page"


def environment_processes(driver: int) -> list[psutil.Process]:
    """Return the processes that play rollouts, without those that start them.

    One that plays may have processes that score for it.
    """
    workers = [
        one for one in descendants(driver) if "telescope_core.processes.worker" in command_of(one)
    ]
    with suppress(psutil.NoSuchProcess):
        starters = {one.ppid() for one in workers}
        return [one for one in workers if one.pid not in starters]
    return []  # one of them has just ended


def server_processes(driver: int) -> list[psutil.Process]:
    """Return the first process of each of the run's servers."""
    name = "telescope_train.inference.vllm_plugin.main"
    return [one for one in descendants(driver) if name in command_of(one)]


def engine_process(server: psutil.Process) -> psutil.Process:
    """Return the process of the server's engine, which does not always get a title of its own."""
    lines = {one: " ".join(command_of(one)) for one in server.children(recursive=True)}
    engines = [one for one, line in lines.items() if line and "resource_tracker" not in line]
    assert len(engines) == 1, f"{command_of(server)} started {sorted(lines.values())}"
    return engines[0]


def assert_folder_opens(place: Path, *, says: str) -> None:
    run = place / "runs" / "victim"
    shown = finish([*TELESCOPE, "eval", "--report", str(run)], place)
    assert says in shown
    files = sorted((run / "rollouts").glob("*.parquet"))
    frame = pandas.concat([pandas.read_parquet(file) for file in files])
    numbers = frame["step"].value_counts().to_dict()
    assert numbers == dict.fromkeys(range(1, len(numbers) + 1), 16)
    assert set(frame["status"]) <= {"kept", "discarded"}
    assert frame["reward"].notna().all()


def back_again(place: Path, process: subprocess.Popen[str], lives: int) -> None:
    """Wait until a server serves in its life number `lives`, and steps go on."""

    def serves() -> bool:
        events = RunFolder.open(place / "runs" / "victim").server_events()
        return any(one.life >= lives and one.state is ServerState.SERVING for one in events)

    until(lambda: serves() or process.poll() is not None, f"life {lives} of a server")
    before = num_steps(place)
    until(lambda: num_steps(place) > before + 3 or process.poll() is not None, "more steps")
    assert process.poll() is None, process.stderr.read() if process.stderr else ""


def assert_nothing_was_lost(place: Path, *, says: str) -> None:
    """Every rollout of every step has tokens of weights that were live, and a reward."""
    assert_folder_opens(place, says=says)
    run = RunFolder.open(place / "runs" / "victim")
    for step in run.rollout_steps():
        for row in run.rollouts([step]):
            assert row.reward is not None
            assert step - 2 <= row.oldest_version <= row.newest_version <= step - 1


@pytest.mark.nightly
def test_servers_come_back_and_a_killed_driver_leaves_a_readable_folder_and_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One run, because its start takes longer than all that happens in it."""
    settings = {"inference_num_workers": "2", "inference_progress_timeout_s": "30"}
    with training(tmp_path, tiny_model, free_port(), settings=settings) as process:
        first, second = server_processes(process.pid)
        first.kill()
        # The other one samples everything meanwhile.
        before = num_steps(tmp_path)
        until(lambda: num_steps(tmp_path) > before or process.poll() is not None, "a step")
        back_again(tmp_path, process, 2)
        second.suspend()
        until(lambda: not alive([second]) or process.poll() is not None, "the end of what hangs")
        back_again(tmp_path, process, 2)
        events = RunFolder.open(tmp_path / "runs" / "victim").server_events()
        assert [one.life for one in events if one.state is ServerState.LOST] == [1, 1]
        assert "hangs" in [one for one in events if one.state is ServerState.LOST][-1].reason
        process.kill()
        process.wait(timeout=30)
    assert_nothing_was_lost(tmp_path, says="interrupted")
    require_shown(tmp_path / "runs", "victim", tmp_path)


NIM = json.dumps(f"{Path(__file__).parents[2] / 'examples' / 'nim.py'}:Nim")
AGAINST_OLDER = f"""
[[environments]]
name = {NIM}
env = {{ opponents = {{ others = {{ older_version = true }} }} }}
[rollout]
discard_group_zero_advantage = false
[trainer]
use_lora = true
[weights]
lora_transfer = "adapter"
[inference]
max_model_len = 512
inference_num_workers = 4
opponent_num_servers = 2
opponent_update_every = 3
[evals]
eval_num_servers = 1
[[evals.evals]]
name = {NIM}
env = {{ opponents = {{ others = {{ older_version = true }} }} }}
eval_every = 4
num_samples = 3
rollouts = 2
[checkpoint]
checkpoint_every = 1
"""


@pytest.mark.nightly
def test_a_lost_older_version_costs_no_match_and_is_never_trained_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Two older versions, LoRA, and evals beside; an opponent's server is killed, then the run."""
    with training(tmp_path, tiny_model, free_port(), more=AGAINST_OLDER) as process:
        until(lambda: num_steps(tmp_path) >= 4 or process.poll() is not None, "four steps")
        run = RunFolder.open(tmp_path / "runs" / "victim")
        # The older of the two: the other one got version 3.
        _, lost = [one for one in run.server_events() if one.role is ServerRole.OPPONENT][:2]
        servers = server_processes(process.pid)
        (server,) = [one for one in servers if lost.server.rsplit(":")[-1] in command_of(one)]
        server.kill()
        back_again(tmp_path, process, 2)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=DEADLINE_S)
    more = ["--resume", "--number_of_steps", str(num_steps(tmp_path) + 3)]
    command = [*TELESCOPE, "train", "small.toml", "run.toml", "more.toml", *more]
    finish([*command, "--inference_base_port", str(free_port())], tmp_path)

    events = [one for one in run.server_events() if one.role is ServerRole.OPPONENT]
    kinds = Counter(one.state for one in events)
    assert kinds[ServerState.LOST] == 1
    held = {one.version for one in events if one.state is ServerState.SERVING}
    trained = {row["step"]: row["tokens/trained"] for row in run.metrics()}
    assert list(trained) == run.rollout_steps()
    for step in trained:
        rows = run.rollouts([step])
        assert [(row.error, row.reward in (0.0, 1.0)) for row in rows] == [(None, True)] * 16
        assert_played_by(rows, held)
        assert {step - 2, step - 1} >= {row.oldest_version for row in rows}
        # Of the policy's seats: those of its opponents are in no row.
        assert trained[step] == sum(row.num_completion_tokens for row in rows)
    points = run.eval_points()
    assert len(points) >= 2
    for point in points:
        assert (point.state, point.versions) == (EvalPointState.DONE, (point.version,))
        rows = EvalFolder(run.evals_path / point.folder).rows()
        assert_played_by(rows, held)
        assert {row.newest_version for row in rows} == {point.version}


def assert_played_by(rows: Sequence[RolloutRow], held: set[int]) -> None:
    """Each match has one seat of the policy and one of versions that some server has held."""
    for row in rows:
        opponent, policy = sorted((row.tags["seat/first"], row.tags["seat/second"]), reverse=True)
        assert policy == "policy"
        assert {int(one) for one in opponent.removeprefix("version ").split()} <= held


def test_an_environment_process_and_the_only_engine_come_back_and_a_dead_rank_is_named(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One run, in which ranks are not started again."""
    # A GPU server's engine is a process of its own; on CPU it is one only when asked for.
    variables = {ENGINE_THREAD_VARIABLE: "0"}
    with training(tmp_path, tiny_model, free_port(), **variables) as process:
        require_only_what_the_page_says_listens(process.pid)
        until(lambda: len(environment_processes(process.pid)) == 1, "one environment process")
        (player,) = environment_processes(process.pid)
        before = num_steps(tmp_path)
        player.kill()
        until(lambda: num_steps(tmp_path) > before + 3 or process.poll() is not None, "more steps")
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        metrics = (tmp_path / "runs" / "victim" / "metrics.jsonl").read_text()
        assert '"workers/math-reasoning/restarts":1.0' in metrics.replace(": ", ":")
        spans = RunFolder.open(tmp_path / "runs" / "victim").timeline()
        (replaced,) = [span for span in spans if span.name == "worker replaced"]
        assert (replaced.source, replaced.duration_s) == ("environment math-reasoning", 0.0)
        assert replaced.note
        (server,) = server_processes(process.pid)
        engine_process(server).kill()
        back_again(tmp_path, process, 2)
        (rank,) = (
            one for one in descendants(process.pid) if "RankActor" in " ".join(command_of(one))
        )
        rank.kill()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 6, errors
    assert "trainer rank 0 died" in errors
    assert_nothing_was_lost(tmp_path, says="failed")


@pytest.mark.nightly
async def test_an_engine_that_hangs_behind_a_living_server_gives_no_sign_of_life(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_THREAD_VARIABLE, "0")
    log = tmp_path / "inference.log"
    settings = ServerSettings(
        model_path=str(tiny_model), port=free_port(), log_path=log, max_model_len=1024
    )
    with running(settings, deadline_s=DEADLINE_S) as server:
        client = TokenClient(settings.base_url)
        engine = engine_process(psutil.Process(server.pid))
        sampling = Sampling(max_tokens=900, temperature=1.0)
        asked = Request(prompt_ids=[5, 6, 7], sampling=sampling, cache_salt="v0")
        request = client.generate(asked)
        try:
            assert await asyncio.to_thread(server.check_engine)
            engine.suspend()
            waiting = asyncio.create_task(request)
            # What vLLM says of it, and what the engine says.
            health = await asyncio.to_thread(urlopen, f"{settings.base_url}/health", timeout=30)
            assert health.status == 200
            assert not await asyncio.to_thread(server.check_engine)
            assert not await client.is_alive(within_s=1.0)
            assert not waiting.done()
            engine.resume()
            assert await asyncio.to_thread(server.check_engine)
            assert len((await asyncio.wait_for(waiting, DEADLINE_S)).token_ids) > 0
            engine.kill()
            until(lambda: engine_is_gone(server), "the death of the engine to be told")
        finally:
            await client.close()


def engine_is_gone(server: ServerProcess) -> bool:
    try:
        server.check()
        server.check_engine()
    except ProcessDiedError:
        return True
    return False
