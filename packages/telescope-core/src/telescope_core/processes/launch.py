"""Start a worker on this machine, or connect to one elsewhere, and make sure that it ends.

A worker started here sees only the environment variables on an allow-list. The secrets that its
environment declares are sent over its socket.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from telescope_core.base.errors import EnvironmentProcessError
from telescope_core.base.secret_names import require_own_secrets, secret_values
from telescope_core.base.terminal import foreign
from telescope_core.examples.dataset_source import DATASETS_VARIABLE
from telescope_core.processes.settings import LOG_VARIABLE, split_address
from telescope_core.records.output_logs import ENVIRONMENT_OUTPUT, OutputLog, first_error

_PASSED_ON = """
    PATH HOME USER LANG LANGUAGE TZ TMPDIR TEMP TMP SYSTEMROOT SHELL TERM
    PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING
    PYTHONPATH VIRTUAL_ENV OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE
    HF_ENDPOINT TRANSFORMERS_OFFLINE TELESCOPE_AGENTS
"""
PASSED_ON = frozenset(_PASSED_ON.split())
"""The environment variables that a worker sees, besides LC_*: no keys and no tokens."""
_TAIL_LINES = 12
_SEARCHED_LINES = 50
_TAIL_CHARACTERS = 4000
_POLL_S = 0.01
_EPITAPH_S = 1.0


class Lifeline(Protocol):
    """Controls a worker that was started or connected to."""

    async def end(self, *, within_s: float) -> None:
        """Wait up to `within_s` seconds for the worker to end, then end it by force. Idempotent."""
        ...

    def kill(self) -> None:
        """End the worker and everything it started now."""
        ...

    async def epitaph(self) -> str:
        """Return how the worker ended and its last output, for an error message."""
        ...

    def hide(self, values: Iterable[str]) -> None:
        """Remove these secrets from everything that is kept of its output from now on."""
        ...


class WorkerPlace(Protocol):
    """A place for a worker: this machine, or an address."""

    @property
    def label(self) -> str:
        """Name of the worker for messages."""
        ...

    @property
    def token(self) -> str:
        """Secret that authenticates the host to the worker."""
        ...

    @property
    def gets_secrets(self) -> bool:
        """Whether the values of declared secrets are sent to the worker."""
        ...

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> Lifeline:
        """Start a worker, or reach a running one, and connect `protocol` to it.

        Raises EnvironmentProcessError after `silence_s` seconds in which nothing moves on.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """A worker process on this machine; each start creates a new process."""

    label: str
    environment: str
    factory: str
    interpreter: str
    memory_limit_bytes: int | None
    log_path: Path | None
    """Log of its output; its own log lies beside it. None = only the last lines of output are
    kept."""
    log_source: str = ""
    """Its name as a source in that log."""
    is_debug: bool = False
    search_path: tuple[str, ...] = ()
    """Folders to import from, searched before all others."""
    datasets: Mapping[str, str] = field(default_factory=dict[str, str])
    """`repo@commit` -> folder that is read instead of that dataset on the Hub."""
    version: str = ""
    """Version to report for an environment that is not installed."""
    own_variables: tuple[str, ...] = ()
    """Names of further variables of this machine that are passed to the worker."""
    hide: frozenset[str] = field(default=frozenset(), repr=False)
    """Values of secrets that are removed from the log of its output."""
    token: str = ""
    gets_secrets: bool = True

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> "LocalWorker":
        """Start the process and connect to it; it then greets over the connection."""
        del silence_s  # nothing is waited for here
        with ExitStack() as passed, ExitStack() as undone:
            output = self._output()
            undone.callback(output.close)
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            passed.callback(theirs.close)
            guard_read, guard_write = os.pipe()
            undone.callback(os.close, guard_write)
            passed.callback(os.close, guard_read)
            try:
                process = self._spawn(theirs.fileno(), guard_read, output.fd)
            except OSError as error:
                raise EnvironmentProcessError(
                    f"{self.label} cannot be started with {self.interpreter!r}: {error}; "
                    "reinstall the environment"
                ) from error
            undone.pop_all()
        output.begin()
        worker = LocalWorker(process, guard=guard_write, output=output, log_path=self.log_path)
        try:
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        except BaseException:
            ours.close()
            worker.kill()
            await worker.end(within_s=_EPITAPH_S)
            raise
        return worker

    def _spawn(self, socket_fd: int, guard_fd: int, output: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command(socket_fd, guard_fd),
            env=self.variables(),
            pass_fds=(socket_fd, guard_fd),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def variables(self) -> dict[str, str]:
        """Return all environment variables of the worker."""
        variables = scrubbed(os.environ, interpreter=self.interpreter)
        own = [name for name in self.own_variables if name in os.environ]
        require_own_secrets(own, "the environment")
        variables |= {name: os.environ[name] for name in own}
        if self.datasets:
            variables[DATASETS_VARIABLE] = json.dumps(dict(self.datasets))
        if self.log_path is not None:
            # Not an argument: an environment with an older telescope-core would refuse it.
            folder = os.path.abspath(self.log_path.parent)
            log = {"folder": folder, "source": self.log_source, "is_debug": self.is_debug}
            variables[LOG_VARIABLE] = json.dumps(log)
        return variables

    def _command(self, socket_fd: int, guard_fd: int) -> list[str]:
        command = [
            *(self.interpreter, "-P", "-m", "telescope_core.processes.worker", self.environment),
            *("--factory", self.factory, "--fd", str(socket_fd), "--guard-fd", str(guard_fd)),
        ]
        if self.memory_limit_bytes is not None:
            command += ["--memory-limit-bytes", str(self.memory_limit_bytes)]
        command += [part for path in self.search_path for part in ("--first-path", path)]
        if self.version:
            command += ["--version", self.version]
        if self.interpreter == sys.executable:
            command += [part for path in sys.path if path for part in ("--path", path)]
        return command

    def _output(self) -> OutputLog:
        if self.log_path is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
        own = {os.environ[name] for name in self.own_variables if os.environ.get(name)}
        return OutputLog(
            self.log_path,
            component=ENVIRONMENT_OUTPUT,
            source=self.log_source,
            hide={*self.hide, *own, *secret_values(os.environ)},
        )


class LocalWorker:
    """A worker process on this machine; its supervisor ends its whole process group."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        guard: int,
        output: OutputLog,
        log_path: Path | None,
    ) -> None:
        self._process = process
        self._guard: int | None = guard
        self._output = output
        self._log_path = log_path

    async def end(self, *, within_s: float) -> None:
        """Wait up to `within_s` seconds for the worker to end, then end it by force. Idempotent."""
        if not await self._has_ended(within_s):
            self.kill()
            if not await self._has_ended(within_s):
                self._process.kill()
                await self._has_ended(within_s)
        self.kill()
        await asyncio.to_thread(self._output.close)

    def kill(self) -> None:
        """Close the guard pipe, so that the supervisor ends the process group."""
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def hide(self, values: Iterable[str]) -> None:
        """Remove these secrets from everything that is kept of its output from now on."""
        self._output.hide(values)

    async def epitaph(self) -> str:
        """Return how the worker ended and the last lines of its log."""
        if await self._has_ended(_EPITAPH_S):
            await asyncio.to_thread(self._output.drain, _EPITAPH_S)
        return f"{_how_ended(self._process.poll())}{self._last_words()}"

    def _last_words(self) -> str:
        lines = foreign(self._output.tail(_TAIL_LINES), _TAIL_CHARACTERS)
        # A worker that printed nothing has no log of its output.
        has_log = self._log_path is not None and self._log_path.exists()
        where = f"; its log is {self._log_path}" if has_log else ""
        if error := foreign(
            first_error(self._output.tail(_SEARCHED_LINES)), _TAIL_CHARACTERS // 10
        ):
            where = f"; it printed: {error}{where}"
        return f"{where}; its last lines:\n{lines}" if lines else where

    async def _has_ended(self, within_s: float) -> bool:
        give_up_s = time.monotonic() + within_s
        while self._process.poll() is None:
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _how_ended(code: int | None) -> str:
    if code is None:
        return "it is still running"
    number = code - 128 if code > 128 else -code
    if number == signal.SIGKILL:
        return "it was killed by SIGKILL (by a user, or by the system because memory ran out)"
    return f"it was ended by signal {number}" if number > 0 else f"its exit code is {code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """A worker that was started separately, in a container or on another machine."""

    label: str
    address: str
    token: str
    gets_secrets: bool = False

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> "RemoteWorker":
        """Connect to the worker."""
        host, port = split_address(self.address)
        try:
            async with asyncio.timeout(silence_s):
                await asyncio.get_running_loop().create_connection(lambda: protocol, host, port)
        except OSError as error:
            why = str(error) or f"no connection in {silence_s:g} s"
            raise EnvironmentProcessError(
                f"{self.label} cannot be reached ({why}); check the address, and check that a "
                "worker was started there with --listen"
            ) from error
        return RemoteWorker(self.address)


class RemoteWorker:
    """A worker that was started separately; this side controls only the connection."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def end(self, *, within_s: float) -> None:
        """Do nothing: the worker stays and waits for the next host."""

    def kill(self) -> None:
        """Do nothing: the worker is not a process of this host."""

    def hide(self, values: Iterable[str]) -> None:
        """Do nothing: it gets no secrets from here, and its output is elsewhere."""

    async def epitaph(self) -> str:
        """Return where the worker's output can be found."""
        return f"its output is on the machine where it was started ({self._address})"


def scrubbed(environ: Mapping[str, str], *, interpreter: str) -> dict[str, str]:
    """Return the part of `environ` that is passed to a worker.

    A different interpreter does not get the search path of this one, because it has its own
    packages. Programs that those install come first, as where its environment is activated.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in PASSED_ON or name.startswith("LC_")
    }
    if interpreter != sys.executable:
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            kept.pop(name, None)
        kept["PATH"] = f"{os.path.dirname(interpreter)}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept
