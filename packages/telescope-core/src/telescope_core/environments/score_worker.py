"""The worker process of `ScoreProcesses`: builds the environment once, then answers calls.

Everything here is synchronous except the author's async methods. The process ends when the socket
closes or, in the middle of a call, when its parent process is gone.
"""

import asyncio
import importlib
import inspect
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any, cast

from telescope_core.base.retries import is_transient
from telescope_core.environments.usage import asking_nobody

_HEADER = struct.Struct(">Q")
_PARENT_CHECK_S = 1.0


def main(file_descriptor: int) -> None:
    """Serve one parent over the socket `file_descriptor`."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with (
        socket.socket(fileno=file_descriptor) as connection,
        connection.makefile("rb") as messages,
        suppress(EOFError),
    ):
        factory, config = pickle.load(messages)
        module, _, name = factory.partition(":")
        built = _outcome(lambda: attrgetter(name)(importlib.import_module(module))(config))
        _send(connection, (built[0], None if built[0] == "returned" else built[1]))
        while True:
            method, arguments, may_ask = pickle.load(messages)
            call = partial(_call, getattr(built[1], method), arguments)
            with nullcontext([]) if may_ask else asking_nobody() as refused:
                outcome = _outcome(call)
            _send(connection, ("refused", refused[0]) if refused else outcome)


def _call(method: Callable[..., Any], arguments: tuple[object, ...]) -> object:
    result = method(*arguments)
    if not inspect.isawaitable(result):
        return result
    return asyncio.run(_awaited(cast(Awaitable[object], result)))


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _outcome(work: Callable[[], object]) -> tuple[str, Any]:
    try:
        return "returned", work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a boundary: it is raised again in the parent
        kind = "failed" if is_transient(error) else "raised"
        return kind, f"{type(error).__name__}: {error}"


def _send(connection: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    connection.sendall(_HEADER.pack(len(data)) + data)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
