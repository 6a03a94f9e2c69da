"""The Ray cluster of a run: join or start one, and await the answers of its processes."""

import asyncio
import math
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._private.node import Node
from ray._private.ray_logging import stdout_deduplicator
from ray._private.utils import read_ray_address
from ray._raylet import AuthenticationTokenLoader
from ray.exceptions import ActorUnavailableError, AuthenticationError, RayActorError, RayError

from telescope_core.base import interrupts
from telescope_core.base.addresses import without_brackets
from telescope_core.base.errors import ConfigError, ProcessDiedError, TelescopeError
from telescope_core.records.output_logs import first_error
from telescope_train.cluster.leftovers import ScratchFolder, Watchdog
from telescope_train.cluster.placement import Bundle
from telescope_train.config.schema import RaySection

# Only batches, log-probs and answers pass through Ray; weights do not. By default Ray would take
# 30 % of the machine's memory for its store.
OBJECT_STORE_BYTES = 512 * 2**20
"""Size of Ray's object store on a cluster that is started here."""
CONNECT_S = 10.0
"""Longest wait for a connection to a cluster, in seconds."""
UNREACHABLE_S = 120.0
"""Seconds after which an unreachable actor must answer again or is known to be dead.

Ray declares a node dead that has not answered for about half a minute."""
LOOK_AGAIN_S = 1.0
HEAD_EVERY_S = 0.25
"""Seconds between two looks at Ray's own processes. Ray tells the death of a rank at once, and that
its own processes died is to be known first."""
ENDED_WITHIN_S = 3.0
"""Seconds after the end of our own cluster within which its processes have to end."""
TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_LOG_MONITOR = Node.start_log_monitor
_PID = re.compile(r"\bpid: (\d+)")
KEPT_LOG_BYTES = 2**20
"""Most bytes that are kept of each log of our own cluster after a failure."""
TIMED_OUT = "timed out during startup"
"""Text in Ray's error for a process that took too long to start."""
SESSION_PREFIX = "telescope-ray-"
"""Prefix of the folder for a cluster's token, sockets and logs."""
RAY_FOLDER = "ray"
"""Ray's folder, inside one that only this user can enter; Ray's own is writable for all."""
MAX_TEMP_PATH = 16
"""Longest temporary folder, in bytes, in which the paths of Ray's sockets fit."""


class Watched(Protocol):
    """A process that shows whether it makes progress."""

    async def signs_of_life(self) -> int:
        """Return a number that changes whenever the process has made progress."""
        ...


class UnreachableError(ProcessDiedError):
    """The connection to an actor broke during a call; whether the call was made is unknown."""


class RayDiedError(ProcessDiedError):
    """An essential process of Ray has died."""


class _RayProcess(subprocess.Popen[bytes]):
    """A process of Ray that ignores signals to this process, which ends it at the right time.

    A terminal sends its signals to a group of processes, and a queue or systemd to all processes of
    a job. Without `gcs_server`, this process would wait for Ray until Ray ended it.
    """

    def __init__(
        self, command: Sequence[str], *, preexec_fn: Callable[[], None], **options: Any
    ) -> None:
        self._is_gcs = Path(command[0]).name == "gcs_server"

        def prepare() -> None:
            preexec_fn()
            # It starts no processes, which would inherit this.
            if self._is_gcs:
                signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.NUMBERS)

        super().__init__(command, preexec_fn=prepare, start_new_session=True, **options)

    def terminate(self) -> None:
        """Ask it to end, as Ray does before it kills it; kills `gcs_server`, which would not."""
        if self._is_gcs:
            self.kill()
        else:
            super().terminate()


class HeadProcesses:
    """The essential processes of Ray that this process has started."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._names = {one: one.name() for one in processes}

    @classmethod
    def found(cls) -> "HeadProcesses":
        """Return those of the cluster that was just started; none for a cluster that was joined."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            # Another child may end just now.
            with suppress(psutil.NoSuchProcess):
                if child.name() in ("gcs_server", "raylet"):
                    found.append(child)
        return cls(found)

    def check(self) -> None:
        """Raise RayDiedError if one of them has ended."""
        for process, name in self._names.items():
            # One that has ended stays a zombie until Ray looks at it, which may be just now.
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            raise RayDiedError(
                f"Ray's {name} (process {process.pid}) died, and with it all processes that it "
                "has started; look for the cause in its log and in the kernel log (out of "
                "memory?)"
            )

    @property
    def pids(self) -> list[int]:
        """Their process ids, which are also the process groups of their children."""
        return [one.pid for one in self._names]

    def started(self) -> list[psutil.Process]:
        """Return their processes and all descendants."""
        found: list[psutil.Process] = []
        for process in self._names:
            with suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
        return found

    async def watch(self) -> None:
        """Never return; raises RayDiedError as soon as one has ended."""
        while True:
            self.check()
            await asyncio.sleep(HEAD_EVERY_S)


@contextmanager
def ray_cluster(
    section: RaySection, bundles: Sequence[Bundle], *, debug: bool, keep_logs: Path | None = None
) -> Iterator[HeadProcesses]:
    """Connect to a cluster that can hold `bundles`, until the context ends.

    `keep_logs`: where the logs of a cluster of the run's own go if the context ends in a failure.
    """
    # Ray reads these variables when it starts its processes, so they are set before `ray.init`.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Placement decides which GPUs a process sees. Ray must not hide them from one that has none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray gives its workers a lower priority than other processes, but here they are the main job.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # With `log_to_driver` off, Ray still prints what its raylets say of processes that died.
    ray_worker._worker_logs_enabled = debug
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": debug,
        "logging_level": "INFO" if debug else "ERROR",
        "runtime_env": dict(section.ray_runtime_env) or None,
    }
    if (address := section.ray_address) is not None:
        _require_listening(address)
        _init(options | {"address": address})
        head = HeadProcesses([])
        try:
            yield head
        finally:
            _shut_down(head)
        return
    # The path of a socket may have 107 bytes, of which Ray uses 64, and these folders 27.
    scratch = ScratchFolder(SESSION_PREFIX, max_parent_bytes=MAX_TEMP_PATH)
    with _token_of_its_own(scratch.path):
        try:
            with interrupts.held():
                _start(options | _own_cluster(bundles, scratch.path))
                head = HeadProcesses.found()
                # The kernel ends both when this process dies, but not what they have started.
                watchdog = Watchdog(head.pids)
        except KeyboardInterrupt:
            scratch.remove()
            raise
        except ConfigError:
            scratch.leave()  # it names the logs that are there
            raise
        try:
            interrupts.raise_if_asked()
            yield head
        except Exception:
            _shut_down(head)
            if keep_logs is not None:
                _keep_logs(scratch.path / RAY_FOLDER, keep_logs)
            raise
        finally:
            with interrupts.held():
                _shut_down(head)
                watchdog.end()
                scratch.remove()


def _shut_down(head: HeadProcesses) -> None:
    # Cut short, it would leave processes behind.
    with interrupts.held():
        started = head.started()
        ray.shutdown()
        # Agents of Ray may live on for half a minute after it.
        _, left = psutil.wait_procs(started, timeout=ENDED_WITHIN_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def _token_of_its_own(folder: Path) -> Iterator[None]:
    """Give the cluster in `folder` a token that only this user can read.

    Ray's own goes to `~/.ray`, which there need not be, and where everybody may read it.
    """
    path = folder / "auth_token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    before = os.environ.get(TOKEN_PATH_VARIABLE)
    os.environ[TOKEN_PATH_VARIABLE] = str(path)
    # Ray keeps the token that this process has used before.
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        del os.environ[TOKEN_PATH_VARIABLE]
        if before is not None:
            os.environ[TOKEN_PATH_VARIABLE] = before
        AuthenticationTokenLoader.instance().reset_cache()


def _keep_logs(session: Path, folder: Path) -> None:
    """Copy the ends of the logs of Ray's processes."""
    # What there is of it may help; that a disk is full must not hide the failure. Without a folder
    # above, the run was moved away, and its folder is not to be made anew.
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for path in (session / "session_latest" / "logs").iterdir():
            if path.is_file() and (size := path.stat().st_size):
                with path.open("rb") as stream:
                    stream.seek(max(0, size - KEPT_LOG_BYTES))
                    (folder / path.name).write_bytes(stream.read())


def _require_listening(address: str) -> None:
    """Raise ConfigError if nothing listens at `address`.

    Ray tries for a minute to reach a cluster that is gone, and then ends this process without a
    word.
    """
    place = address
    if address == "auto":
        # Ray would use these: the variable, or the note of a `ray start` on this machine.
        place = os.environ.get("RAY_ADDRESS") or read_ray_address() or ""
    host, separator, port = place.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdecimal():
        raise ConfigError(
            f"expected ray_address = 'host:port' of a running cluster, got {address!r}"
            + (", and no cluster was started on this machine" if address == "auto" else "")
            + "; start one with `ray start --head`, which prints its address"
        )
    try:
        address_there = (without_brackets(host), int(port))
        socket.create_connection(address_there, timeout=CONNECT_S).close()
    except OSError as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ConfigError:
    if _asks_for_token(error):
        return ConfigError(
            f"the Ray cluster at ray_address = {address!r} asks for a token, which a plain `ray "
            "start --head` makes it do. Set RAY_AUTH_MODE=token for this command and before `ray "
            "start` on every node, and give all of them the token that `ray get-auth-token` prints "
            "on the head: in ~/.ray/auth_token, or as RAY_AUTH_TOKEN. To do without, on a network "
            "of your own, start every node with RAY_AUTH_MODE=disabled"
        )
    return ConfigError(
        f"cannot reach the Ray cluster at ray_address = {address!r}: {error}; "
        "start it with `ray start --head`, or leave ray_address out to start one here"
    )


def _asks_for_token(error: BaseException | None) -> bool:
    """Return whether a connection failed because of a missing or wrong token."""
    while error is not None:
        # Where Ray raises another class on the way, the name stands in its text.
        if isinstance(error, AuthenticationError) or "AuthenticationError" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _own_cluster(bundles: Sequence[Bundle], folder: Path) -> dict[str, Any]:
    """Return the options of a cluster that is started here and joined by nobody else."""
    # Ray only counts CPUs and does not bind processes to them. A machine with fewer cores than
    # the run has processes still works, so it is declared large enough for all of them. Nor are
    # more declared: Ray starts a Python process for each before anyone asks.
    needed = sum(bundle.cpus for bundle in bundles)
    return {
        # Without an address, Ray follows `RAY_ADDRESS`, and the note that a `ray start` leaves in
        # its folder even when that cluster is long gone.
        "address": "local",
        # All that Ray starts then listens on this machine alone.
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder / RAY_FOLDER),
        "num_cpus": max(1, math.ceil(needed)),
        "object_store_memory": OBJECT_STORE_BYTES,
        # After a driver is killed, Ray's agents live on for as long as they try to reach its head
        # process again. When that has died, Ray ends the driver after this time: until then it has
        # to have closed everything.
        "_system_config": {"gcs_rpc_server_reconnect_timeout_s": 30},
    }


def _start(options: dict[str, Any]) -> None:
    """Start a cluster; raises ConfigError with Ray's reason if that fails twice.

    Ray gives its processes half a minute to start. On a busy machine, the second try finds the
    files of the first in memory.
    """
    # Otherwise Ray takes another address of this machine in place of 127.0.0.1.
    ray_constants.ENABLE_RAY_CLUSTER = False
    # It scales clusters, and on port 44217 tells everybody on this machine what they do.
    Node.start_monitor = lambda self: None
    # Nobody asks this cluster for its pages or jobs: the process takes a second and 120 MB.
    Node.start_api_server = lambda self, **options: None
    # Another process, which looks for new lines in all logs. Only a driver that shows them asks.
    Node.start_log_monitor = _LOG_MONITOR if options["log_to_driver"] else lambda self: None
    services.ConsolePopen = _RayProcess
    # The end of that log comes from an agent of Ray, on stdout. `HeadProcesses` tells the death.
    stdout_deduplicator.skip_re = re.compile("^Raylet is terminated")
    problem: Exception | None = None
    for _ in range(2):
        others = set(psutil.Process().children(recursive=True))
        try:
            _init(options)
        except BaseException as error:
            # Ray forgets what it has started until then.
            for child in set(psutil.Process().children(recursive=True)) - others:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            # It has no class for a start that takes long.
            if not isinstance(error, Exception):
                raise
            problem = error
            if TIMED_OUT not in str(error):
                break
        else:
            return
    raise ConfigError(
        f"cannot start Ray on this machine: {str(problem).strip()}; its logs are in "
        f"{options['_temp_dir']}. Look for other work that keeps the processors busy, for free "
        "memory, free space there and a limit on processes (ulimit -u), or set ray_address to a "
        "cluster that runs already"
    ) from problem


def _init(options: dict[str, Any]) -> None:
    """Start or join a cluster; raises ConfigError with Ray's reason if joining fails."""
    # Ray's C++ would end this process with a list of its frames at SIGTERM.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        with interrupts.kept(), interrupts.held():
            ray.init(**options)
    # What Ray raises depends on the step that failed: these are all that its code and libraries
    # use for an address that cannot be read, and a cluster that is gone.
    except (ConnectionError, OSError, RuntimeError, ValueError, RayError) as error:
        ray.shutdown()  # it may have started some of its processes
        if options["address"] == "local":
            raise
        raise _unreachable(options["address"], error) from error
    except SystemExit:
        # Ray raises this at SIGTERM while it starts.
        interrupts.note(signal.SIGTERM)
    if interrupts.asked() is not None:
        ray.shutdown()
        interrupts.raise_if_asked()


def cluster_has_gpus() -> bool:
    """Return whether any node of the connected cluster has a GPU."""
    return ray.cluster_resources().get("GPU", 0.0) > 0


async def answer(
    reference: Any,
    *,
    process: str,
    watched: Watched | None = None,
    timeout_s: float,
    limit: str = "worker_progress_timeout_s",
) -> Any:
    """Await an actor's answer; its death or silence raises ProcessDiedError with `process`.

    Silence is `timeout_s` seconds without an answer in which `watched` shows no sign of life
    either; `limit` names the setting of that. A connection that was lost is an UnreachableError.
    An error of Telescope that the actor raised is raised as it is.
    """
    # Ray reports an actor's death by itself. The deadline is for an actor that lives but hangs.
    waiting = asyncio.ensure_future(result_of(reference))
    signs: int | None = None
    try:
        while True:
            done, _ = await asyncio.wait([waiting], timeout=timeout_s)
            if done:
                return _shown(waiting, process)
            before, signs = signs, await _signs_of_life(watched, timeout_s)
            # The first look has nothing to compare with, so a process that stands still from the
            # start is found after two timeouts.
            if signs is None or signs == before:
                raise ProcessDiedError(
                    f"{process} made no progress for {timeout_s:g} s; see its log in the run "
                    f"folder, or raise {limit}"
                )
    finally:
        waiting.cancel()


async def is_back(ask: Callable[[], Any]) -> bool:
    """Return whether an actor that could not be reached answers `ask` again.

    False as soon as Ray knows that it or its node is dead, and after `UNREACHABLE_S` seconds.
    """
    try:
        async with asyncio.timeout(UNREACHABLE_S):
            while True:
                try:
                    await ask()
                except ActorUnavailableError:
                    await asyncio.sleep(LOOK_AGAIN_S)
                else:
                    return True
    except (TimeoutError, RayError):
        return False


async def result_of(reference: Any) -> Any:
    """Await the value of Ray's `reference`; a coroutine, for use in tasks."""
    return await reference


async def _signs_of_life(watched: Watched | None, timeout_s: float) -> int | None:
    if watched is None:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            return await watched.signs_of_life()
    except (TimeoutError, RayError):
        return None  # a death is the answer's to report


def _printed_by(death: str) -> str:
    """Return the first error that the dead process printed; Ray's `death` names its id.

    Empty if it printed none, or on another machine.
    """
    node, pid = ray_worker._global_node, _PID.search(death)
    if node is None or pid is None:
        return ""
    found = ""
    with suppress(OSError):
        for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid[1]}.err"):
            found = found or first_error(path.read_text(encoding="utf-8", errors="replace"))
    return found


def _shown(answered: "asyncio.Future[Any]", process: str) -> Any:
    """Return the answer, or raise an error for users in place of Ray's."""
    try:
        return answered.result()
    except ActorUnavailableError as error:
        why = str(error).strip().partition("\n")[0]
        raise UnreachableError(f"the connection to {process} was lost: {why}") from None
    except RayActorError as error:
        lines = str(error).splitlines()
        # The error of a constructor is at the end of its traceback.
        why = lines[-1] if error.actor_init_failed else _printed_by(str(error)) or lines[0]
        raise ProcessDiedError(
            f"{process} died: {why.rstrip('.')}; "
            "look for the cause in the run folder's logs/ and in the kernel log (out of memory?)"
        ) from None
    except ray.exceptions.RayTaskError as error:
        # Ray wraps an actor's error with its traceback. Users are shown a message of Telescope's
        # alone, and exit codes go by its class.
        if isinstance(error.cause, TelescopeError):
            raise error.cause from None
        raise
