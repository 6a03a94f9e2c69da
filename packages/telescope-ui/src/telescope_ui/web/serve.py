"""Start the server of `telescope ui`, and print its address."""

import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec
import uvicorn

from telescope_core.base import interruptible
from telescope_core.base.addresses import in_url, is_loopback, without_brackets
from telescope_core.base.errors import ConfigError
from telescope_core.base.terminal import escaped
from telescope_core.records.arrow import arrow_modules
from telescope_ui.files.database import opened
from telescope_ui.files.own_server import OwnServer, state_folder
from telescope_ui.index.runs import Runs, require_shown
from telescope_ui.web.app import create_app
from telescope_ui.web.live import Watcher

_END_S = 1
"""Longest time in seconds for which open pages delay the end."""


def serve(
    folders: Sequence[Path],
    *,
    host: str | None = None,
    port: int | None = None,
    allowed_hosts: Sequence[str] = (),
    opens_browser: bool = True,
    as_json: bool = False,
) -> None:
    """Show the runs and evals in `folders` until the process is interrupted.

    If the user's server runs already, it shows them from now on, and this returns at once. Prints
    the address with its token, as one line of JSON with `as_json`.

    Args:
        folders: Each is a run or an eval, or holds some.
        host: Address to listen on; None for loopback, or for that of the running server.
        port: None for the port of the user, which stays the same; 0 for any free one, with a token
            of its own and apart from the user's server.
        allowed_hosts: Names by which a proxy passes requests on.
        opens_browser: Open the address in a browser, where there is a screen.
        as_json: Print address and token as JSON.
    """
    for folder in folders:
        require_shown(folder)
    host = None if host is None else without_brackets(host)
    tell = partial(_tell, as_json=as_json, opens_browser=opens_browser)
    with ExitStack() as held:
        own = None if port == 0 else OwnServer(state_folder())
        running = None
        if own is not None:
            held.callback(own.close)
            running = None if own.claim() else own.running()
        if own is not None and running is not None:
            address = _address(running.host, running.port)
            is_meant = host in (None, running.host) and port in (None, running.port)
            if is_meant and not allowed_hosts:
                own.join(folders)
                token = own.token(is_loopback=is_loopback(running.host))
                tell(address, token, pid=running.pid, joined=folders)
                return
            sys.stderr.write(
                f"telescope ui: your server is at {address} (process {running.pid}); this is "
                "another one, because its options are others\n"
            )
        host = host or "127.0.0.1"
        listening = held.enter_context(_listen(host, port, own))
        number = listening.getsockname()[1]
        token = secrets.token_urlsafe(32)
        if own is not None:
            token = own.token(is_loopback=is_loopback(host))
            own.listens(host, number)
        database = held.enter_context(opened())
        runs = Runs(folders, database, joined=tuple if own is None else own.joined)
        held.callback(runs.close)
        watcher = Watcher(runs)
        held.callback(watcher.close)
        app = create_app(
            runs, database, watcher, token=token, host=host, allowed_hosts=allowed_hosts
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_S,
            lifespan="off",
        )
        sys.stderr.write(exposure(host))
        runs.look()
        for link in runs.left_out:
            said = f"telescope ui: {link} leads out of the folder: name its target to see it\n"
            sys.stderr.write(escaped(said))
        tell(_address(host, number), token, pid=os.getpid(), joined=None)
        # Loading it takes half a second, which the first page that needs it should not wait for.
        Thread(target=arrow_modules, name="load pyarrow", daemon=True).start()
        server = _Server(config, watcher)
        # uvicorn ends in order at the other signals.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, server.handle_exit)
        interruptible.run(server.serve(sockets=[listening]))


class _Server(uvicorn.Server):
    """Ends the events of open pages when it is told to end; they would be cut off, as an error."""

    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher = watcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watcher.end()
        await super().shutdown(sockets)


def exposure(host: str) -> str:
    """Return a warning about listening on `host` if others can reach it, else nothing."""
    if is_loopback(host):
        return ""
    return (
        f"telescope ui: other machines reach {host}, and pages are sent without encryption: who "
        "reads along has the token, and with it all runs; to see them from one machine, listen on "
        "loopback and forward the port: ssh -L PORT:127.0.0.1:PORT THIS_MACHINE\n"
    )


def _has_screen() -> bool:
    """Return whether a browser could open a window; one for terminals would use this terminal."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in screens)


def _listen(host: str, port: int | None, own: OwnServer | None) -> socket.socket:
    """Listen on `port`; without one, on the first free port that `own` suggests."""
    if port is not None or own is None:
        return _bound(host, port or 0)
    for tried in own.ports():
        try:
            listening = _bound(host, tried)
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != EADDRINUSE:
                raise
            continue
        own.keep_port(tried)
        return listening
    return _bound(host, 0)


def _bound(host: str, port: int) -> socket.socket:
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
            "free one, or a --host that this machine has"
        ) from error
    return listening


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{in_url(shown)}:{port}"


def _tell(
    address: str,
    token: str,
    *,
    pid: int,
    joined: Sequence[Path] | None,
    as_json: bool,
    opens_browser: bool,
) -> None:
    """Print the address of server `pid`; `joined`: what it now shows too, if it was running."""
    if as_json:
        fields = {"address": address, "token": token, "pid": pid, "joined": joined is not None}
        line = msgspec.json.encode(fields).decode()
    elif joined is None:
        line = f"telescope ui: {address}/?token={token}   (end it with Ctrl+C)"
    else:
        names = ", ".join(map(str, joined))
        line = (
            f"telescope ui: {address}/?token={token}   (it runs already, as process {pid}, and "
            f"shows {names} too)"
        )
    sys.stdout.write(escaped(f"{line}\n"))
    sys.stdout.flush()
    if opens_browser and _has_screen():
        webbrowser.open(f"{address}/?token={token}")
