"""The server of this user on this machine: its token, its port, and requests to show more.

The files are in the state folder of the user, where nobody else may look. A lock held by the
server's process shows that it is running. Asking its port instead would hand the token to any
process that took the port.
"""

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from telescope_core.base.errors import ConfigError

DEFAULT_PORT = 8353
"""Port of the first user of a machine."""
_MOST_PORTS = 100
"""Number of ports to try from the default one on."""
_BEGINS_S = 10.0
"""Longest time for another process between locking and listening."""
_LOOK_S = 0.05


class Running(NamedTuple):
    """A running server."""

    host: str
    port: int
    pid: int


class OwnServer:
    """The files of the server of a user on this machine; only the holder of the lock writes."""

    def __init__(self, state: Path) -> None:
        """Keep them in `state`, which is created if needed.

        Raises ConfigError if nothing can be kept there, or if it belongs to another user, who could
        have put a token there.
        """
        self._state = state
        name = socket.gethostname()
        self._lock_path = state / f"{name}.server"
        self._port_path = state / f"{name}.port"
        self._folders_path = state / f"{name}.folders"
        self._lock: IO[str] | None = None
        self._joined: tuple[int, tuple[Path, ...]] = (0, ())
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened(self._lock_path):
                pass
        except OSError as error:
            raise self._unusable(str(error)) from None
        if state.stat().st_uid != os.getuid():
            raise self._unusable("it belongs to another user")

    def token(self, *, is_loopback: bool) -> str:
        """Return the token, which is created once.

        A server that other machines can reach has another token, because it is sent without
        encryption.
        """
        path = self._state / ("token" if is_loopback else "token-of-network")
        with self._opened(path) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            token = stream.read().strip()
            if len(token) < 32:
                token = secrets.token_urlsafe(32)
                stream.seek(0)
                stream.truncate()
                stream.write(f"{token}\n")
        return token

    def claim(self) -> bool:
        """Become the server of the user until `close`; False if another process is it."""
        lock = self._opened(self._lock_path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        except OSError as error:
            lock.close()
            raise self._unusable(f"it knows no locks: {error}") from None
        self._lock = lock
        lock.truncate(0)
        with self._opened(self._folders_path) as stream:
            stream.truncate(0)
        return True

    def listens(self, host: str, port: int) -> None:
        """Publish the server's address for other processes of the user."""
        if self._lock is not None:
            self._lock.write(json.dumps({"host": host, "port": port, "pid": os.getpid()}))
            self._lock.flush()

    def close(self) -> None:
        """Stop being the server."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def running(self) -> Running | None:
        """Return the server in another process; None if it gets no port."""
        deadline_s = time.monotonic() + _BEGINS_S
        while time.monotonic() < deadline_s:
            text = self._lock_path.read_text(encoding="utf-8")
            if text.endswith("}"):
                return Running(**json.loads(text))
            time.sleep(_LOOK_S)
        return None

    def join(self, folders: Sequence[Path]) -> None:
        """Ask the server to show `folders` too, until it ends."""
        with self._opened(self._folders_path) as stream:
            stream.seek(0, os.SEEK_END)
            stream.write("".join(f"{json.dumps(os.path.abspath(one))}\n" for one in folders))

    def joined(self) -> tuple[Path, ...]:
        """Return the folders of all `join` calls since the server began."""
        try:
            size = self._folders_path.stat().st_size
            if size != self._joined[0]:
                lines = self._folders_path.read_text(encoding="utf-8").splitlines()
                self._joined = size, tuple(Path(json.loads(line)) for line in lines)
        except (OSError, ValueError):
            # Half a line of a process that writes it now is read when it is whole.
            pass
        return self._joined[1]

    def ports(self) -> list[int]:
        """Return the ports to try, the last used one first."""
        after = range(DEFAULT_PORT, DEFAULT_PORT + _MOST_PORTS)
        with self._opened(self._port_path) as stream:
            text = stream.read().strip()
        return list(dict.fromkeys([*([int(text)] if text.isdecimal() else []), *after]))

    def keep_port(self, port: int) -> None:
        """Try `port` first next time, if this is the server of the user."""
        if self._lock is None:
            return
        with self._opened(self._port_path) as stream:
            stream.truncate(0)
            stream.write(str(port))

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"cannot keep the address of the server in {self._state}: {why}; set XDG_STATE_HOME to "
            "another folder, or take --port 0, which keeps nothing"
        )

    def _opened(self, path: Path) -> IO[str]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        return open(descriptor, "r+", encoding="utf-8")


def state_folder() -> Path:
    """Return the folder of these files: `$XDG_STATE_HOME/telescope/ui`, else ~/.local/state's."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if named.startswith("/") else Path.home() / ".local" / "state"
    return base / "telescope" / "ui"
