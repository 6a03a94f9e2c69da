"""The command of an environment worker: `python -m telescope_core.processes.worker`.

A worker that a host starts uses the socket it inherits and ends with its host. With `--listen`, a
worker waits for hosts that show the token.
"""

import argparse
import asyncio
import faulthandler
import json
import logging
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from telescope_core.base.addresses import in_url
from telescope_core.base.collector import rare_collections
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.first_process import go_on_below_first
from telescope_core.base.process_facts import limit_addresses
from telescope_core.chat.trouble import showing_troubles
from telescope_core.environments.running import NotedExit, Notes
from telescope_core.finding.locate import (
    load_environment_class,
    locate_environment,
    use_search_path,
)
from telescope_core.processes.frames import Beat
from telescope_core.processes.handshake import Identity, version_of
from telescope_core.processes.main_thread import MainThread
from telescope_core.processes.serve import Served, ServedCall, Serving
from telescope_core.processes.settings import LOG_VARIABLE, TOKEN_VARIABLE, split_address
from telescope_core.processes.watch import WorkerThreads, WorkerWatch, beating, go_on_in_kept_child
from telescope_core.records.logs import Logs

_SPARE_ADDRESSES_BYTES = 2**30
"""Address space in addition to the memory limit, for thread stacks and mapped files."""
_SHORTEST_TOKEN = 16
_LOGGER = logging.getLogger(__name__)
_leave = os._exit  # before it is noted who calls it


class Worker:
    """A worker process and the hosts that it serves."""

    def __init__(self, served: Served, *, ends_with_host: bool) -> None:
        self._served = served
        self._ends_with_host = ends_with_host
        self._hosts: set[Serving] = set()
        self._ended = asyncio.Event()
        threads = WorkerThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        # Filled by the event loop and emptied by the thread of the watch; both are atomic.
        self._troubles: deque[str] = deque()
        self._watch = WorkerWatch(threads, self._beat, served.notes)

    def host(self) -> asyncio.Protocol:
        """Return the protocol for a connection from a new host."""
        serving = Serving(self._served, on_ended=self._forget)
        self._hosts.add(serving)
        return serving.connection

    async def until_ended(self) -> None:
        """Return when the host has ended; a worker that listens never returns."""
        await self._ended.wait()

    def show_trouble(self, line: str) -> None:
        """Write `line` to the log of this process, and report it to hosts with the next beat."""
        _LOGGER.warning("%s", line)
        self._troubles.append(line)

    def _beat(self, beat: Beat, blocked_by: ServedCall | None) -> None:
        lines = [self._troubles.popleft() for _ in range(len(self._troubles))]
        beat = msgspec.structs.replace(beat, trouble="; ".join(lines))
        for serving in list(self._hosts):
            serving.beat(beat, blocked_by=blocked_by)

    def _forget(self, serving: Serving) -> None:
        self._hosts.discard(serving)
        if self._ends_with_host:
            self._ended.set()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one environment until the host has ended, or with `--listen` forever."""
    options = _parser().parse_args(arguments)
    try:
        _go_to_own_interpreter(options)
        if options.listen is not None:
            go_on_below_first()
        # A worker that listens has no host yet.
        with nullcontext() if options.fd is None else beating(options.fd):
            served = _served(options)
    except TelescopeError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    # The last lines of a worker that crashes are then the calls in which it did.
    faulthandler.enable()
    if options.guard_fd is not None and options.fd is not None:
        notes = Notes()
        go_on_in_kept_child(options.guard_fd, options.fd, notes)
        os._exit = NotedExit()
        # The first beat of the watch comes after a moment, in which code may hold everything.
        notes.beat()
        served = replace(served, notes=notes)
    _begin_log()
    if options.memory_limit_bytes:
        _limit_memory(options.memory_limit_bytes)
    try:
        main_thread = MainThread(_exit_now)
        served = replace(served, build=main_thread.run)
        with rare_collections():
            main_thread.serve(partial(_serve, served, options))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        sys.stderr.write(f"error: cannot listen on {options.listen}: {error}\n")
        sys.exit(ConfigError.exit_code)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # A normal exit would wait forever for threads in which environment code never returns.
    _leave(0)


def _begin_log() -> None:
    """Write a log in the place that the host has set."""
    told = os.environ.pop(LOG_VARIABLE, "")
    if told:
        place = json.loads(told)
        logs = Logs(folder=Path(place["folder"]), is_debug=place["is_debug"])
        # The output of this process is a file beside the log, which would have warnings twice.
        logs.begin("environment", place["source"], shows_warnings=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m telescope_core.processes.worker",
        description="Serve one environment to a host.",
    )
    parser.add_argument("environment", help="installed name, or module:Class")
    parser.add_argument("--factory", help="module:Class of an installed environment")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"wait for hosts at this address; they must show the token in {TOKEN_VARIABLE}",
    )
    parser.add_argument("--fd", type=int, help="socket inherited from the host")
    parser.add_argument("--guard-fd", type=int, help="pipe that closes when the host is gone")
    parser.add_argument("--memory-limit-bytes", type=int, default=0)
    parser.add_argument("--path", action="append", default=[], help="folder to import from")
    parser.add_argument(
        "--first-path", action="append", default=[], help="folder to import from before all others"
    )
    parser.add_argument(
        "--version", default="", help="version of an environment that is not installed"
    )
    return parser


def _go_to_own_interpreter(options: argparse.Namespace) -> None:
    """Replace this process by the Python that has the environment, if that is another one."""
    name = str(options.environment)
    if options.factory is not None or options.listen is None:
        return
    location = locate_environment(name)
    options.factory, options.first_path = location.factory, list(location.search_path)
    options.version = location.version if location.search_path else ""
    if location.interpreter in ("", sys.executable):
        return
    command = [location.interpreter, "-P", "-m", "telescope_core.processes.worker", name]
    command += ["--factory", location.factory, "--listen", str(options.listen)]
    command += ["--memory-limit-bytes", str(options.memory_limit_bytes)]
    os.environ.pop("PYTHONPATH", None)
    os.execv(location.interpreter, command)


def _served(options: argparse.Namespace) -> Served:
    if (options.listen is None) == (options.fd is None):
        raise ConfigError("expected --listen host:port, such as --listen 0.0.0.0:7000")
    token = ""
    if options.listen is not None:
        split_address(options.listen)
        # Environment code and the programs it starts must not be able to read the token.
        token = os.environ.pop(TOKEN_VARIABLE, "")
        if len(token) < _SHORTEST_TOKEN:
            raise ConfigError(
                f"{TOKEN_VARIABLE} must hold a secret of at least {_SHORTEST_TOKEN} characters, "
                "because anyone who knows it can run rollouts here"
            )
    use_search_path(options.first_path)
    sys.path += [path for path in options.path if path not in sys.path]
    name = str(options.environment)
    factory = str(options.factory)
    identity = Identity(name=name, version=options.version or version_of(factory))
    try:
        found = load_environment_class(factory, folders=options.first_path)
    except TelescopeError as error:
        if options.listen is not None:
            raise
        problem = (type(error).__name__, str(error))
        return Served(identity=identity, environment_class=None, problem=problem, token=token)
    return Served(identity=identity, environment_class=found, token=token)


async def _serve(served: Served, options: argparse.Namespace) -> None:
    worker = Worker(served, ends_with_host=options.listen is None)
    with showing_troubles(worker.show_trouble):
        await _serve_hosts(worker, served, options)


async def _serve_hosts(worker: Worker, served: Served, options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    if options.fd is not None:
        inherited = socket.socket(fileno=options.fd)
        await loop.create_connection(worker.host, sock=inherited)
        await worker.until_ended()
        return
    host, port = split_address(options.listen)
    server = await loop.create_server(worker.host, host, port, reuse_address=True)
    bound = server.sockets[0].getsockname()
    what = f"{served.identity.name} {served.identity.version}"
    sys.stdout.write(f"serving {what} on {in_url(bound[0])}:{bound[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def _exit_now(number: int, frame: FrameType | None) -> None:
    _leave(0)


def _limit_memory(limit_bytes: int) -> None:
    """Make a single huge allocation raise MemoryError; the host checks the memory in use."""
    statm = Path("/proc/self/statm")
    used = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    total = used + limit_bytes + _SPARE_ADDRESSES_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit_addresses(total, hard)


if __name__ == "__main__":
    main()
