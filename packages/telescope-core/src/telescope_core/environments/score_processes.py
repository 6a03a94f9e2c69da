"""`ScoreProcesses`: processes that run methods declared `@runs_in("process")`.

Each process holds a copy of the environment, built from its class and config. When the task of a
call is cancelled, for example by the rollout's deadline, its process is killed and replaced.
"""

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, cast

from telescope_core.base.errors import EnvironmentLoadError, ProcessDiedError, RewardRaisedError
from telescope_core.environments.usage import may_ask, require_may_ask

HEADER = struct.Struct(">Q")
"""Length in bytes of the pickle that follows an answer."""
_RAISED = ("raised", "failed")
"""Kinds of answers of a call that raised; `failed` where the error is transient."""
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from telescope_core.environments.score_worker import main; main(int(sys.argv[1]))"
)


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loop: asyncio.AbstractEventLoop

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if not self.loop.is_closed():
            self.writer.close()


class ScoreProcesses:
    """At most `max_processes` workers, started on demand and kept."""

    def __init__(self, environment_class: type, config: object, *, max_processes: int) -> None:
        self._factory = f"{environment_class.__module__}:{environment_class.__qualname__}"
        self._config = config
        self._lanes = asyncio.Semaphore(max_processes)
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    async def run(self, method: str, arguments: tuple[object, ...]) -> object:
        """Call `method` in a worker and return its result; RewardRaisedError if it raised."""
        async with self._lanes:
            worker = self._take_idle() or await self._start()
            self._busy.append(worker)
            try:
                kind, value = await self._exchange(worker, (method, arguments, may_ask()))
            except BaseException:
                worker.kill()
                raise
            finally:
                self._busy.remove(worker)
            self._idle.append(worker)
        if kind == "refused":
            require_may_ask(value)
        if kind in _RAISED:
            name = self._factory.rpartition(":")[2]
            text = f"{name}.{method} raised {value}"
            raise RewardRaisedError(text, is_transient=kind == "failed")
        return value

    def close(self) -> None:
        """Kill all processes."""
        for worker in [*self._idle, *self._busy]:
            worker.kill()
        self._idle.clear()

    def _take_idle(self) -> _Worker | None:
        loop = asyncio.get_running_loop()
        while self._idle:
            worker = self._idle.pop()
            if worker.loop is loop and worker.process.poll() is None:
                return worker
            worker.kill()
        return None

    async def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, theirs))
        try:
            # Shielded, as whoever is cancelled meanwhile still has a process to end.
            process = await asyncio.shield(spawning)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            spawning.add_done_callback(_end)
            raise
        worker = _Worker(process, reader, writer, asyncio.get_running_loop())
        try:
            kind, problem = await self._exchange(worker, (self._factory, self._config))
        except BaseException:
            worker.kill()
            raise
        if kind in _RAISED:
            worker.kill()
            raise EnvironmentLoadError(
                f"cannot run methods of {self._factory} in a process: {problem}; the class must be "
                "importable by that name, and it must be possible to build it from its config alone"
            )
        return worker

    async def _exchange(self, worker: _Worker, message: object) -> tuple[str, Any]:
        data = pickle.dumps(message)
        try:
            worker.writer.write(data)
            await worker.writer.drain()
            (length,) = HEADER.unpack(await worker.reader.readexactly(HEADER.size))
            return cast(tuple[str, Any], pickle.loads(await worker.reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status = await asyncio.to_thread(worker.process.wait, 5)
            raise ProcessDiedError(
                f"a process that scores for {self._factory} ended with status {status} in the "
                "middle of a call (a negative status is the signal that killed it; -9 often means "
                "that memory ran out)"
            ) from error


def _end(spawning: "asyncio.Task[subprocess.Popen[bytes]]") -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()
        spawning.result().wait()


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker that communicates over `theirs`; its output goes to standard error."""
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
