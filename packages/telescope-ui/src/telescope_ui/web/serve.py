"""Starts the server of `telescope ui`, and prints where it is."""

import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import msgspec
import uvicorn

from telescope_core.base import interruptible
from telescope_core.base.addresses import in_url
from telescope_core.base.errors import ConfigError
from telescope_core.base.terminal import escaped
from telescope_core.records.arrow import arrow_modules
from telescope_ui.base.guard import is_loopback
from telescope_ui.files.database import Database, cache_folder
from telescope_ui.index.runs import Runs
from telescope_ui.web.app import create_app
from telescope_ui.web.live import Watcher

_END_S = 1
"""How long open pages may hold up the end."""


def serve(
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    opens_browser: bool = True,
    as_json: bool = False,
) -> None:
    """Show the runs in `folders` until the process is interrupted; port 0 takes a free one.

    Prints the address with its token, as one line of JSON with `as_json`.
    """
    token = secrets.token_urlsafe(32)
    listening = _listen(host, port)
    database = Database(cache_folder())
    try:
        runs = Runs(folders, database)
    except ConfigError:
        listening.close()
        database.close()
        raise
    watcher = Watcher(runs)
    try:
        app = create_app(runs, database, watcher, token=token, host=host)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_S,
            lifespan="off",
        )
        address = _address(host, listening.getsockname()[1])
        sys.stderr.write(exposure(host))
        for link in runs.left_out():
            said = f"telescope ui: {link} leads out of the folder: name its target to see it\n"
            sys.stderr.write(escaped(said))
        _say(address, token, as_json=as_json)
        # Loading it takes half a second, which the first page that needs it should not wait for.
        Thread(target=arrow_modules, name="load pyarrow", daemon=True).start()
        if opens_browser and _has_screen():
            webbrowser.open(f"{address}/?token={token}")
        server = uvicorn.Server(config)
        # uvicorn ends in order at the other signals.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, server.handle_exit)
        interruptible.run(server.serve(sockets=[listening]))
    finally:
        watcher.close()
        runs.close()
        listening.close()
        database.close()


def exposure(host: str) -> str:
    """Return a line on what listening on `host` means where others reach it, else nothing."""
    if is_loopback(host):
        return ""
    return (
        f"telescope ui: other machines reach {host}, and pages are sent without encryption: who "
        "reads along has the token, and with it all runs; to see them from one machine, listen on "
        "loopback and forward the port: ssh -L PORT:127.0.0.1:PORT THIS_MACHINE\n"
    )


def _has_screen() -> bool:
    """Whether a browser has somewhere to show itself; one for terminals would take this one."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in screens)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose another --port, or 0 for a "
            "free one"
        ) from None
    return listening


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{in_url(shown)}:{port}"


def _say(address: str, token: str, *, as_json: bool) -> None:
    if as_json:
        fields = {"address": address, "token": token, "pid": os.getpid()}
        line = msgspec.json.encode(fields).decode()
    else:
        line = f"telescope ui: {address}/?token={token}   (end it with Ctrl+C)"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
