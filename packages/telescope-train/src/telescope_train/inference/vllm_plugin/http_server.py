"""vLLM's HTTP server: its guard and socket, large frames, and slow clients."""

import os
import socket
import sys
from contextlib import suppress
from typing import Any

import uvicorn

from telescope_train.inference.vllm_plugin.guard import Guard
from telescope_train.inference.wire import MAX_FRAME_BYTES


def install(secret: str, identity: str = "") -> None:
    """Change the defaults of every server of this process; `secret`: required in requests.

    `identity`: of this life of the server. vLLM passes none of these options on.
    """
    config = uvicorn.Config

    def configured(app: Any, *arguments: Any, **options: Any) -> uvicorn.Config:
        # By default a client that does not answer a ping within 20 s is taken for dead, and a
        # driver may be busy for longer, for example while it writes a large step. A client that is
        # really gone closes its socket, or its address stops answering.
        sockets = {"ws_max_size": MAX_FRAME_BYTES, "ws_ping_timeout": None}
        guarded = Guard(app, secret, identity) if secret or identity else app
        return config(guarded, *arguments, **{**sockets, **options})

    uvicorn.Config = configured  # type: ignore[assignment,misc]


def listen_on(descriptor: int) -> None:
    """Make vLLM listen on a socket that this process inherited, in place of a new one.

    vLLM would bind the port itself, with SO_REUSEADDR and long before it listens: two servers could
    then have the same port, and one of them would answer for both.
    """
    from vllm.entrypoints.launchers.launcher import create_server_socket

    os.set_inheritable(descriptor, False)
    given = socket.socket(fileno=descriptor)

    def close_in_child() -> None:
        # An engine in a process of its own would hold the port after the death of this one.
        with suppress(OSError):
            os.close(given.detach())

    os.register_at_fork(after_in_child=close_in_child)
    launcher: Any = sys.modules[create_server_socket.__module__]
    launcher.create_server_socket = lambda *_, **__: given
