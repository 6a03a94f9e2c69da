"""Keep an environment from the network and from other people's files, and record attempts.

If the kernel lets an ordinary user create a network namespace, that cuts off the network for code
in any language. An audit hook records the attempts of Python code and refuses them; on other
machines there is only the hook. Neither is a sandbox against malicious code.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from telescope_core.sandboxes.local.bubblewrap import UNPRIVILEGED_ID

_SET_PARENT_DEATH_SIGNAL = 1
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NETWORK_EVENTS = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}
_PATH_EVENTS = {
    "os.mkdir": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.truncate": (0, None),
    "os.rename": (1, 3),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "sqlite3.connect": (0, None),
}
"""Audit event -> index of the argument with the path to change, and of the one with the open
folder, if any."""
_MAX_ATTEMPTS = 50
NETWORK_NAMESPACE = "network namespace"
AUDIT_HOOK = "audit hook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One forbidden action that the code attempted."""

    kind: Literal["network", "write"]
    what: str
    where: str
    """`file:line` of the environment's innermost frame, or else of any package's."""
    phase: str


class Guard:
    """Watches this process once installed. An audit hook cannot be removed again."""

    def __init__(self, *, writable: Sequence[Path], own_folders: Sequence[str]) -> None:
        self._writable = tuple(os.path.realpath(path) for path in writable)
        self._own = tuple(os.path.realpath(path) for path in own_folders)
        self._libraries = sysconfig.get_path("stdlib")
        self.phase = ""
        """Name of the current step; empty while nothing is watched."""
        self.allows_loopback = False
        self.allows_network = False
        self.allows_writes = False
        self.attempts: list[Attempt] = []

    def install(self) -> None:
        """Start watching whenever `phase` is not empty."""
        sys.addaudithook(self._hook)

    def seen(self, kind: str, *phases: str) -> list[Attempt]:
        """Return the forbidden actions that were attempted in `phases`."""
        return [one for one in self.attempts if one.kind == kind and one.phase in phases]

    def watch_play(self) -> None:
        """Watch rollouts, which may write files and use loopback, but not any other network."""
        self.allows_loopback = self.allows_writes = True
        self.phase = "play"
        self.install()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.phase:
            return
        if event in _NETWORK_EVENTS:
            address = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
            if not self.allows_network and self._is_outside(address):
                self._note("network", str(address))
                raise ConnectionRefusedError(f"the network is cut off while validating: {address}")
        elif event == "open":
            path, mode, flags = arguments
            is_write = bool(flags & _WRITES) if isinstance(flags, int) else (mode or "r") != "r"
            if is_write and isinstance(path, str | bytes | os.PathLike):
                self._require_writable(path)
        elif event in _PATH_EVENTS and len(arguments) > _PATH_EVENTS[event][0]:
            at, folder_at = _PATH_EVENTS[event]
            path = arguments[at]
            if isinstance(path, str | bytes | os.PathLike):
                folder = arguments[folder_at] if folder_at is not None else -1
                self._require_writable(_placed(path, folder))

    def _is_outside(self, address: object) -> bool:
        if isinstance(address, tuple):
            address = next(iter(cast(tuple[object, ...], address)), "")
        if isinstance(address, bytes):
            address = address.decode("ascii", "replace")
        if not isinstance(address, str) or address.startswith(("/", "\0")) or not address:
            return False
        is_loopback = address in ("localhost", "::1") or address.startswith("127.")
        return not (is_loopback and self.allows_loopback)

    def _require_writable(self, path: Any) -> None:
        text = os.fsdecode(path)
        if (
            self.allows_writes
            or text in (":memory:", os.devnull)
            or text.startswith(("/proc/self/", "file:"))
        ):
            return
        real = os.path.realpath(text)
        if "__pycache__" in real or any(
            real == folder or real.startswith(folder + os.sep) for folder in self._writable
        ):
            return
        self._note("write", text)
        raise PermissionError(f"writing outside the caches is refused while validating: {text}")

    def _note(self, kind: Literal["network", "write"], what: str) -> None:
        if len(self.attempts) < _MAX_ATTEMPTS:
            where, phase = self._place(), self.phase
            self.attempts.append(Attempt(kind=kind, what=what, where=where, phase=phase))

    def _place(self) -> str:
        frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
        fallback = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if os.path.realpath(file).startswith(self._own):
                return f"{file}:{frame.f_lineno}"
            if not fallback and not file.startswith((self._libraries, "<")):
                fallback = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return fallback


def _placed(path: Any, folder: object) -> str:
    """Return `path`, resolved if it is relative to the open `folder`, a descriptor; -1 = none."""
    text = os.fsdecode(path)
    if not isinstance(folder, int) or folder < 0 or os.path.isabs(text):
        return text
    opened = Path(f"/proc/self/fd/{folder}")
    return str(opened.readlink() / text) if opened.is_symlink() else text


def cut_off_network() -> str:
    """Move this process into its own network with nothing but loopback; returns the method.

    Call it before any thread starts, as the kernel allows it only for single-threaded processes.
    """
    if sys.platform != "linux":
        return AUDIT_HOOK
    user, group, parent = os.getuid(), os.getgid(), os.getppid()
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is None:
        return AUDIT_HOOK
    with _ids_written_by_another(user) as write_ids:
        if unshare(_NEW_USER | _NEW_NET):
            return AUDIT_HOOK
        end_with_parent(parent)  # the kernel forgets it when credentials change
        has_ids = write_ids()
    try:
        if not has_ids:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket() as probe:
            request = struct.pack("16sH14x", b"lo", 0)
            _, flags = struct.unpack("16sH14x", fcntl.ioctl(probe, _GET_FLAGS, request))
            fcntl.ioctl(probe, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    except OSError:
        return f"{NETWORK_NAMESPACE}, without loopback"
    return NETWORK_NAMESPACE


@contextmanager
def _ids_written_by_another(user: int) -> Generator[Callable[[], bool]]:
    """Yield while another process sets the user ids of the new namespace.

    Inside, a process can only name itself. Root has to find the user there to which sandboxes drop,
    or no environment that needs one could be validated as root. Other users cannot name anybody.
    """
    if user != 0:
        yield lambda: False
        return
    waits, begins = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(begins)
        has_begun = os.read(waits, 1) == b"1"
        os._exit(0 if has_begun and _wrote_ids(os.getppid()) else 1)
    os.close(waits)
    has_ended = False

    def write_ids() -> bool:
        nonlocal has_ended
        has_ended = True
        os.write(begins, b"1")
        return os.waitpid(writer, 0)[1] == 0

    try:
        yield write_ids
    finally:
        os.close(begins)
        if not has_ended:
            os.waitpid(writer, 0)


def _wrote_ids(process: int) -> bool:
    lines = "".join(f"{one} {one} 1\n" for one in (0, UNPRIVILEGED_ID))
    try:
        Path(f"/proc/{process}/uid_map").write_text(lines)
        Path(f"/proc/{process}/gid_map").write_text(lines)
    except OSError:
        return False
    return True


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, process `parent`, has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
