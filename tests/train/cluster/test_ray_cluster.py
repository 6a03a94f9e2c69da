"""A run's own Ray beside any other, joining one, and waiting for processes that may be stuck."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.utils import validate_socket_filepath

from telescope_core.base import interrupts
from telescope_core.errors import ConfigError, ProcessDiedError
from telescope_train.cluster import ray_cluster as module
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


class Here:
    """Says which process it is in."""

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.engine
def test_a_run_starts_its_own_ray_whatever_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray looks for the note of a `ray start` in its temporary folder, and in this variable. Both
    # name a cluster that is long gone.
    short = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    (short / "ray").mkdir()
    (short / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    # Ray's own token would go there.
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    handler = signal.getsignal(signal.SIGTERM)
    with ray_cluster(RaySection(), BUNDLES, debug=False) as head:
        assert ray.cluster_resources()["CPU"] >= 1
        assert signal.getsignal(signal.SIGTERM) is handler
        started = head.started()
        assert {"gcs_server", "raylet"} <= {one.name() for one in started}
        # An actor, because its process listens too.
        assert ray.get(ray.remote(Here).remote().pid.remote()) != os.getpid()
        driver = psutil.Process()
        tree = [driver, *driver.children(recursive=True)]
        hosts = {
            connection.laddr.ip.removeprefix("::ffff:")
            for one in tree
            for connection in one.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert hosts == {"127.0.0.1"}
        # It serves metrics to everybody on this machine.
        assert not [
            one for one in tree if any(word.endswith("/monitor.py") for word in one.cmdline())
        ]
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        # Ray lets everybody write into its own folder, who could put another token there.
        folder = session.parents[1]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.name.startswith("telescope-ray-")
        assert Path(os.environ[module.TOKEN_PATH_VARIABLE]).parent == folder
    assert not folder.exists(), "a run that went well leaves no folder of Ray's behind"
    assert not ray.is_initialized()
    assert [one for one in started if one.is_running()] == []


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
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
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
    Path(folder).parent.rmdir()


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_slow_start_is_tried_once_more(
    num_slow: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[object] = []

    def start(**_: object) -> None:
        tries.append(None)
        if len(tries) <= num_slow:
            # What Ray raises has no class of its own.
            raise Exception("The current node timed out during startup. This could happen")

    monkeypatch.setattr(module.ray, "init", start)
    monkeypatch.setattr(module, "_session_folder", lambda: tmp_path)
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module.ray, "init", lambda **_: None)
    monkeypatch.setattr(module, "_session_folder", lambda: tmp_path)
    monkeypatch.delenv(module.TOKEN_PATH_VARIABLE, raising=False)
    with ray_cluster(RaySection(), BUNDLES, debug=False):
        token = Path(os.environ[module.TOKEN_PATH_VARIABLE])
        assert token.parent == tmp_path
        assert token.stat().st_mode & 0o777 == 0o600
        assert len(token.read_text()) == 64
    assert not token.exists()
    assert module.TOKEN_PATH_VARIABLE not in os.environ


def test_a_signal_while_ray_starts_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(**_: object) -> None:
        # As Ray does, whose handler raises SystemExit wherever it is.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(module.ray, "init", start)
    monkeypatch.setattr(module, "_session_folder", lambda: tmp_path / "session")
    (tmp_path / "session").mkdir()
    before = signal.getsignal(signal.SIGTERM)
    with (
        interrupts.taken(),
        pytest.raises(interrupts.Interrupted) as caught,
        ray_cluster(RaySection(), BUNDLES, debug=False),
    ):
        pass
    assert caught.value.exit_code == 143
    assert not (tmp_path / "session").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_death_of_a_process_of_ray_is_named() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
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


@pytest.mark.parametrize("parent", ["/somewhere/" + "deep/" * 20, "/t/" + "\u00fc" * 8])
def test_a_long_path_of_temporary_files_is_not_used(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: parent)
    folder = module._session_folder()
    folder.rmdir()
    assert folder.parent == Path("/tmp")


def test_sockets_of_ray_have_room_in_the_longest_folder_that_is_used() -> None:
    parent = "/" + "x" * (module.MAX_TEMP_PATH - 1)
    folder = Path(parent, "telescope-ray-12345678", module.RAY_FOLDER)
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
