"""The template of local sandboxes: one running bubblewrap, from which sandboxes are forked.

A fork costs a third of starting another user's program, bubblewrap and an interpreter. See
`zygote.py` for what a fork does before a program may run in it.
"""

import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
from collections.abc import Callable

from telescope_core.sandboxes.errors import SandboxError
from telescope_core.sandboxes.local.command_line import (
    Descriptors,
    InnerLimits,
    drop_words,
    template_words,
)
from telescope_core.sandboxes.local.started import (
    ENVIRONMENT,
    Ingredients,
    Started,
    made_ready,
    passed_memory_file,
    text_of,
)

_END_S = 10.0


class Template:
    """A running template. It ends with this process, or after a minute without a sandbox."""

    def __init__(self, ingredients: Ingredients) -> None:
        """Start it; raises SandboxError if bubblewrap cannot be started."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with contextlib.ExitStack() as passed:
            passed.callback(theirs.close)
            self._said = os.memfd_create("telescope-sandbox")
            descriptors = Descriptors(
                status=-1,
                filter=-1,
                code=passed_memory_file(passed, ingredients.supervisor),
                connection=theirs.fileno(),
                template=passed_memory_file(passed, ingredients.template),
            )
            words = template_words(
                ingredients.program, ingredients.interpreter, descriptors, ingredients.read_only
            )
            try:
                self._process = subprocess.Popen(
                    [*drop_words(), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=(descriptors.code, descriptors.template, descriptors.connection),
                )
            except OSError as error:
                self._control.close()
                os.close(self._said)
                raise SandboxError(f"a local sandbox could not be started: {error}") from error
        self._control.send(ingredients.filter)

    @property
    def is_running(self) -> bool:
        """Whether it is running; its connection shows first that it has ended."""
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:
            return False
        return False

    async def fork(self, limits: InnerLimits, on_pid: Callable[[int], None]) -> Started:
        """Start a sandbox, as `start` does with bubblewrap alone."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        wanted = (
            *(limits.max_processes, limits.disk_bytes, limits.address_bytes),
            limits.time_to_live_s,
        )
        try:
            await self._send(marshal.dumps(wanted, 2), theirs.fileno())
        except OSError as error:
            ours.close()
            said = text_of(self._said)
            raise SandboxError(
                f"the template of local sandboxes has ended ({error}): {said}"
            ) from error
        finally:
            theirs.close()
        started = Started(None, ours)
        await made_ready(started, started.introduced(), on_pid, lambda: text_of(self._said))
        return started

    async def close(self) -> None:
        """End it, and every sandbox that was forked from it."""
        self._control.close()
        await asyncio.to_thread(self._ended)
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def _ended(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _send(self, message: bytes, descriptor: int) -> None:
        """Send a request; with many at once, waits until there is room."""
        while True:
            try:
                socket.send_fds(self._control, [message], [descriptor])
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
