"""A run's own Ray beside any other, joining one, and waiting for processes that may be stuck."""

import asyncio
import builtins
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import worker as ray_worker
from ray._private.utils import validate_socket_filepath
from tests.actors import Here
from tests.processes import Program, command_of, listening_hosts

from telescope_core.base import interrupts
from telescope_core.errors import ConfigError, ProcessDiedError
from telescope_train.cluster import ray_cluster as module
from telescope_train.cluster.leftovers import ScratchFolder
from telescope_train.cluster.placement import Bundle
from telescope_train.cluster.ray_cluster import (
    HeadProcesses,
    RayDiedError,
    answer,
    ray_cluster,
)
from telescope_train.config.schema import RaySection

BUNDLES = [Bundle(cpus=1.0)]
DEADLINE_S = 60.0
SHORT_S = 0.001
"""So short that it has passed whenever the event loop looks."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files with a path that is short enough for Ray."""
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@pytest.mark.engine
def test_a_run_starts_its_own_ray_whatever_others_left(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray looks for the note of a `ray start` in its temporary folder, and in this variable. Both
    # name a cluster that is long gone.
    (temporary / "ray").mkdir()
    (temporary / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    # Ray's own token would go there.
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    handler = signal.getsignal(signal.SIGTERM)
    with ray_cluster(RaySection(), BUNDLES, debug=False) as head:
        # However many cores there are: Ray starts as many processes in advance.
        assert ray.cluster_resources()["CPU"] == 1
        assert signal.getsignal(signal.SIGTERM) is handler
        started = head.started()
        assert {"gcs_server", "raylet"} <= {one.name() for one in started}
        # An actor, because its process listens too.
        assert ray.get(ray.remote(Here).remote().pid.remote()) != os.getpid()
        driver = psutil.Process()
        tree = [driver, *driver.children(recursive=True)]
        assert set().union(*map(listening_hosts, tree)) == {"127.0.0.1"}
        # The first serves metrics to everybody on this machine; nobody here asks the others.
        unused = ("/monitor.py", "/dashboard.py", "/log_monitor.py")
        assert not [one for one in tree if any(word.endswith(unused) for word in command_of(one))]
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        # Ray lets everybody write into its own folder, who could put another token there.
        folder = session.parents[1]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.name.startswith("telescope-ray-")
        assert Path(os.environ[module.TOKEN_PATH_VARIABLE]).parent == folder
    left = [one.name for one in temporary.iterdir()]
    assert left == ["ray"], "a run that went well leaves no folder of Ray's behind"
    assert not ray.is_initialized()
    assert [one for one in started if one.is_running()] == []


STARTED = """
import os, signal, time, ray
from telescope_core.base.interrupts import NUMBERS
from telescope_train.cluster.placement import Bundle
from telescope_train.cluster.ray_cluster import ray_cluster
from telescope_train.config.schema import RaySection

class Here:
    def pid(self):
        return os.getpid()

def ask(number, frame):
    print(number, ray.get(one.pid.remote()), flush=True)

with ray_cluster(RaySection(), [Bundle(cpus=1.0)], debug=False):
    one = ray.remote(Here).remote()
    for number in NUMBERS:
        signal.signal(number, ask)
    ask(0, None)
    # Not signal.pause(): a signal just before it would be answered after the next one only.
    while True:
        time.sleep(0.05)
"""


@pytest.mark.engine
def test_a_signal_for_the_group_is_not_for_ray_which_ends_when_its_driver_is_killed(
    temporary: Path,
) -> None:
    command = [sys.executable, "-c", STARTED]
    variables = os.environ | {"TMPDIR": str(temporary)}
    with Program(
        command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        _, pid = process.stdout.readline().split()
        started = psutil.Process(process.pid).children(recursive=True)
        assert int(pid) in [one.pid for one in started]
        for number in interrupts.NUMBERS:
            os.killpg(process.pid, number)
            assert process.stdout.readline().split() == [str(int(number)), pid]
        process.kill()
        _, left = psutil.wait_procs(started, timeout=DEADLINE_S)
        assert left == []
    assert [one.name for one in temporary.glob(f"{module.SESSION_PREFIX}*/owner")] == ["owner"]
    ScratchFolder(module.SESSION_PREFIX, max_parent_bytes=module.MAX_TEMP_PATH).remove()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:1",
            r"ray_address = '127\.0\.0\.1:1'.*refused",
        ),
        ("ray://127.0.0.1:1", r"ray_address = 'ray://127"),
        ("[::1]:1", r"ray_address = '\[::1\]:1'.*refused"),
        ("auto", r"ray_address = 'auto'.*refused"),
        ("somewhere", r"ray_address = 'host:port'.*'somewhere'"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_message(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(ConfigError, match=message),
        ray_cluster(RaySection(ray_address=address), BUNDLES, debug=False),
    ):
        pass
    assert not ray.is_initialized(), "no Ray of its own is started in place of that"


@pytest.mark.parametrize("error", [RuntimeError, OSError, ConnectionError, ValueError])
def test_a_ray_that_does_not_start_is_one_message(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    def fail(**_: object) -> None:
        raise error("no room for the raylet")

    monkeypatch.setattr(module.ray, "init", fail)
    with (
        pytest.raises(ConfigError, match=r"no room for the raylet") as caught,
        ray_cluster(RaySection(), BUNDLES, debug=False),
    ):
        pass
    (folder,) = [word.rstrip(".") for word in str(caught.value).split() if "telescope-ray-" in word]
    assert Path(folder).parent.is_dir(), "where Ray's own logs would be"
    assert list(Path(folder).parent.iterdir()) == [], "nothing by which it would be deleted"


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_slow_start_is_tried_once_more(
    num_slow: int, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    tries: list[object] = []

    def start(**_: object) -> None:
        tries.append(None)
        if len(tries) <= num_slow:
            # What Ray raises has no class of its own.
            raise Exception("The current node timed out during startup. This could happen")

    monkeypatch.setattr(module.ray, "init", start)
    if num_slow == 1:
        with ray_cluster(RaySection(), BUNDLES, debug=False):
            assert len(tries) == 2
        return
    with (
        pytest.raises(ConfigError, match=r"timed out during startup.*ulimit -u"),
        ray_cluster(RaySection(), BUNDLES, debug=False),
    ):
        pass
    assert len(tries) == 2


def test_the_token_is_for_this_user_alone_and_needs_no_home(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setattr(module.ray, "init", lambda **_: None)
    monkeypatch.delenv(module.TOKEN_PATH_VARIABLE, raising=False)
    with ray_cluster(RaySection(), BUNDLES, debug=False):
        token = Path(os.environ[module.TOKEN_PATH_VARIABLE])
        assert token.parent.parent == temporary
        assert token.stat().st_mode & 0o777 == 0o600
        assert len(token.read_text()) == 64
    assert not token.exists()
    assert module.TOKEN_PATH_VARIABLE not in os.environ


def test_only_a_run_that_shows_logs_has_who_looks_for_them_whatever_ran_before_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module.Node.start_log_monitor
    monkeypatch.setattr(module, "_LOG_MONITOR", own)
    monkeypatch.setattr(module.Node, "start_log_monitor", own)
    monkeypatch.setattr(module.ray, "init", lambda **_: None)
    for debug in (False, True, False):
        with ray_cluster(RaySection(), BUNDLES, debug=debug):
            assert (module.Node.start_log_monitor is own) == debug


def test_a_signal_while_ray_starts_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    def start(**_: object) -> None:
        # As Ray does, whose handler raises SystemExit wherever it is.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(module.ray, "init", start)
    before = signal.getsignal(signal.SIGTERM)
    with (
        interrupts.taken(),
        pytest.raises(interrupts.Interrupted) as caught,
        ray_cluster(RaySection(), BUNDLES, debug=False),
    ):
        pass
    assert caught.value.exit_code == 143
    assert list(temporary.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_death_of_a_process_of_ray_is_named() -> None:
    with Program(["sleep", "600"]) as process:
        head = HeadProcesses([psutil.Process(process.pid)])
        head.check()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RayDiedError, match=f"sleep \\(process {process.pid}\\)"):
            head.check()
    with pytest.raises(RayDiedError):
        head.check()


@pytest.mark.parametrize("is_cause", [True, False])
def test_a_cluster_that_asks_for_a_token_says_what_to_do(
    is_cause: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        asked = ray.exceptions.AuthenticationError("InvalidAuthToken")
        if is_cause:
            raise ConnectionError("could not connect") from asked
        raise RuntimeError("Traceback: ray.exceptions.AuthenticationError: no token")

    monkeypatch.setattr(module.ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=rf"{address}.*RAY_AUTH_MODE=token"),
            ray_cluster(RaySection(ray_address=address), BUNDLES, debug=False),
        ):
            pass
    assert not ray.is_initialized()


def test_the_runtime_environment_reaches_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def note(**options: object) -> None:
        given.update(options)

    monkeypatch.setattr(module.ray, "init", note)
    variables = {"env_vars": {"HF_HOME": "/data"}}
    with ray_cluster(RaySection(ray_runtime_env=variables), BUNDLES, debug=False):
        assert given["runtime_env"] == variables


@pytest.mark.parametrize("debug", [True, False])
def test_what_raylets_say_of_deaths_is_printed_for_debugging_alone(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.ray, "init", lambda **_: None)
    monkeypatch.setattr(ray_worker, "_worker_logs_enabled", True)
    # Ray puts a function of its own in the place of `print`, for the rest of the process.
    monkeypatch.setattr(builtins, "print", print)
    told = {"lines": [f"A worker died, {debug}"], "pid": "raylet", "is_err": False, "ip": ""}
    with ray_cluster(RaySection(), BUNDLES, debug=debug):
        ray_worker.print_to_stdstream(told, ignore_prefix=False)
    assert ("A worker died" in capsys.readouterr().out) is debug


def test_a_process_of_ray_that_goes_while_it_is_looked_at_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(self: psutil.Process) -> str:
        raise psutil.NoSuchProcess(self.pid)

    head = HeadProcesses([psutil.Process()])
    monkeypatch.setattr(psutil.Process, "status", gone)
    with pytest.raises(ProcessDiedError, match=rf"process {os.getpid()}\) died"):
        head.check()


def test_sockets_of_ray_have_room_in_the_longest_folder_that_is_used() -> None:
    parent = "/" + "x" * (module.MAX_TEMP_PATH - 1)
    folder = Path(parent, f"{module.SESSION_PREFIX}12345678", module.RAY_FOLDER)
    session = "session_2026-11-26_20-57-15_599085_4194304"
    validate_socket_filepath(str(folder / session / "sockets" / "plasma_store"))


class Worker:
    """Shows `signs`, one after the other, and then the last one, or more if it `goes_on`."""

    def __init__(self, *signs: int) -> None:
        self._signs = list(signs)
        self.goes_on = False
        self.asked_often = asyncio.Event()

    async def signs_of_life(self) -> int:
        if len(self._signs) == 1:
            self.asked_often.set()
            self._signs[0] += self.goes_on
            return self._signs[0]
        return self._signs.pop(0)


async def test_a_call_may_last_as_long_as_its_process_moves_on() -> None:
    result = asyncio.get_running_loop().create_future()
    worker = Worker(*range(50))
    worker.goes_on = True
    waiting = asyncio.create_task(
        answer(result, process="rank 0", watched=worker, timeout_s=SHORT_S)
    )
    async with asyncio.timeout(DEADLINE_S):
        await worker.asked_often.wait()
        assert not waiting.done()
        result.set_result("done")
        assert await waiting == "done"


@pytest.mark.parametrize("worker", [Worker(7), Worker(1, 2, 3, 3), None])
async def test_a_process_that_stands_still_is_reported(worker: Worker | None) -> None:
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(ProcessDiedError, match=r"rank 3.*0\.001 s"):
        await asyncio.wait_for(
            answer(never, process="rank 3", watched=worker, timeout_s=SHORT_S), DEADLINE_S
        )
    assert worker is None or worker.asked_often.is_set(), "it was asked until it stood still"


async def test_a_process_that_does_not_even_say_so_is_reported() -> None:
    asked = asyncio.Event()

    class Hung:
        async def signs_of_life(self) -> int:
            asked.set()
            await asyncio.Event().wait()
            return 0

    never = asyncio.get_running_loop().create_future()
    with pytest.raises(ProcessDiedError, match="rank 3"):
        await asyncio.wait_for(
            answer(never, process="rank 3", watched=Hung(), timeout_s=SHORT_S), DEADLINE_S
        )
    assert asked.is_set()


async def test_what_a_constructor_raised_is_the_cause_of_a_death() -> None:
    why = "telescope_core.base.errors.ConfigError: port 8100 on 127.0.0.1 is in use"
    raised = ray.exceptions.RayTaskError(
        "Actor.__init__", f"Traceback (most recent call last):\n{why}", ConfigError(why)
    )
    reference = asyncio.get_running_loop().create_future()
    reference.set_exception(ray.exceptions.ActorDiedError(raised))
    with pytest.raises(ProcessDiedError) as caught:
        await answer(reference, process="the actor", timeout_s=1.0)
    for fact in ("the actor", "ConfigError", "port 8100"):
        assert fact in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_what_is_kept_of_the_logs_of_ray_does_not_make_a_moved_run_folder_anew(tmp_path: Path):
    logs = tmp_path / "session" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("ended")
    run = tmp_path / "run"
    module._keep_logs(tmp_path / "session", run / "logs" / "ray")
    assert not run.exists()
    (run / "logs").mkdir(parents=True)
    module._keep_logs(tmp_path / "session", run / "logs" / "ray")
    assert (run / "logs" / "ray" / "raylet.out").read_text() == "ended"
