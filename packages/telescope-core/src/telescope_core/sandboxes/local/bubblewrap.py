"""Command lines of bubblewrap: they define everything that a local sandbox sees.

Only a short list of paths is visible, never the root of this machine. Packages of the interpreter
are hidden, because an environment's package may contain its hidden tests.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from telescope_core.sandboxes.protocol import WORK_FOLDER

UNPRIVILEGED_ID = 65433
"""User and group for sandboxes of root; no account of Debian, Fedora or systemd has it."""
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_SHARED_MEMORY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that every user of this machine can run."""

    path: str
    prefix: str
    """Folder of its installation, which the sandbox must see."""
    package_folders: tuple[str, ...]
    """Folders of installed packages, which the sandbox must not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Numbers of the open files that bubblewrap is given."""

    status: int
    filter: int
    code: int
    connection: int
    template: int = -1
    """Byte code of the program that forks sandboxes; -1 where bubblewrap starts the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerLimits:
    """Limits that the sandbox sets itself, besides its control group."""

    disk_bytes: int
    max_processes: int
    address_bytes: int
    """Address space of each process; 0 where a control group limits the memory."""
    time_to_live_s: int
    """Seconds after which the supervisor ends by itself, if nobody has ended it."""
    writable: tuple[str, ...] = ()
    """Folders besides `/tmp` that programs may write, each limited to the size of the disk."""


def drop_words() -> list[str]:
    """Return words that make the following command run as an ordinary user, if this is root."""
    if os.getuid() != 0 and os.geteuid() != 0:
        return []
    return [
        "setpriv",
        f"--reuid={UNPRIVILEGED_ID}",
        f"--regid={UNPRIVILEGED_ID}",
        "--clear-groups",
        "--no-new-privs",
    ]


def bubblewrap_words(
    program: str,
    interpreter: Interpreter,
    descriptors: Descriptors,
    limits: InnerLimits,
    read_only: tuple[str, ...] = (),
) -> list[str]:
    """Return the command line that starts a supervisor in its own sandbox."""
    disk = str(limits.disk_bytes)
    supervisor = [
        *(interpreter.path, "-I", "-S", "/run/supervisor.pyc"),
        *(descriptors.connection, limits.max_processes, limits.disk_bytes, limits.address_bytes),
        *(limits.time_to_live_s, *limits.writable),
    ]
    return [
        *(program, "--disable-userns", "--cap-drop", "ALL"),
        *_apart(interpreter),
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
        *("--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", disk, "--tmpfs", "/tmp", "--dir", WORK_FOLDER),
        *(word for path in limits.writable for word in ("--size", disk, "--tmpfs", path)),
        *(word for path in read_only for word in ("--ro-bind", path, path)),
        *("--ro-bind-data", str(descriptors.code), "/run/supervisor.pyc", "--remount-ro", "/"),
        *("--chdir", WORK_FOLDER, "--json-status-fd", str(descriptors.status)),
        *("--seccomp", str(descriptors.filter), "--", *map(str, supervisor)),
    ]


def template_words(
    program: str,
    interpreter: Interpreter,
    descriptors: Descriptors,
    read_only: tuple[str, ...] = (),
) -> list[str]:
    """Return the command line that starts the template, from which sandboxes are forked.

    It keeps the capabilities of its own namespaces, and has no filter, because its forks need both
    to create theirs and then give them up. The last word identifies its owner.
    """
    return [
        *(program, "--cap-add", "ALL"),
        *_apart(interpreter),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--tmpfs", "/tmp"),
        *(word for path in read_only for word in ("--ro-bind", path, path)),
        *("--ro-bind-data", str(descriptors.code), "/run/supervisor.pyc"),
        *("--ro-bind-data", str(descriptors.template), "/run/zygote.pyc", "--remount-ro", "/"),
        *("--chdir", "/", "--", interpreter.path, "-I", "-S", "/run/zygote.pyc"),
        *(str(descriptors.connection), f"of-{os.getpid()}"),
    ]


def variables_of(interpreter: Interpreter) -> dict[str, str]:
    """Return the environment variables of programs in a sandbox."""
    home = str(Path(interpreter.path).parent)
    path = ":".join(dict.fromkeys((home, "/usr/local/bin", "/usr/bin", "/bin")))
    return {"PATH": path, "HOME": WORK_FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


def _apart(interpreter: Interpreter) -> list[str]:
    """Return the words for new namespaces, an empty environment and the visible files."""
    return [
        *("--unshare-all", "--unshare-user"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--as-pid-1"),
        *("--new-session", "--clearenv"),
        *(word for pair in variables_of(interpreter).items() for word in ("--setenv", *pair)),
        *_visible(interpreter),
    ]


def _visible(interpreter: Interpreter) -> list[str]:
    """Return the words that make the system's programs and the interpreter visible."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in _LINKS:
        folder = Path("/", name)
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    for file in _FILES:
        words += ["--ro-bind-try", file, file]
    if not Path(interpreter.prefix).is_relative_to("/usr"):
        words += ["--ro-bind", interpreter.prefix, interpreter.prefix]
    for folder in interpreter.package_folders:
        words += ["--tmpfs", folder, "--remount-ro", folder]
    return words
