"""Process 1 of the template of local sandboxes: each new sandbox is a fork of it.

It runs in a sandbox of bubblewrap: with the file system that every sandbox sees, read-only, and no
network. A fork enters new namespaces of all kinds, gets its own `/proc`, `/tmp`, `/dev/shm` and
terminals, drops every capability, installs the filter of system calls, and becomes the supervisor.
This saves starting a program as another user, bubblewrap and an interpreter.

Any failure ends the fork before it reports that it is ready. It runs no program itself.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingImports=false, reportArgumentType=false
# The modules that it has to make do with have no types.
import _ctypes
import _signal
import _socket
import marshal
import os
import select
import sys
import types

_NEW_MOUNTS, _NEW_GROUPS, _NEW_NAMES, _NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_EVERYTHING_NEW = (
    _NEW_MOUNTS | _NEW_GROUPS | _NEW_NAMES | _NEW_IPC | _NEW_USER | _NEW_PROCESSES | _NEW_NETWORK
)
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _PRIVATE = 32, 4096, 1 << 18 | 16384
_NO_NEW_PRIVILEGES, _SET_FILTER, _FILTER, _DROP_BOUND = 38, 22, 2, 24
_AMBIENT, _AMBIENT_CLEAR, _SET_NAME = 47, 4, 15
_CAPABILITIES_VERSION = 0x20080522
_SET_INTERFACE_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_SHARED_MEMORY = b"mode=1777,size=8388608,nr_inodes=2048"
_BYTES_PER_INODE = 4096
"""A page, the least that a file with content takes: only empty files are limited by number."""
_MAX_DISK = 1 << 62
_IDLE_MS = 60_000
_MAX_REQUEST = 1 << 16

_libc = _ctypes.dlopen(None, 0)


class _FailedError(Exception):
    """A step on which the isolation of a sandbox depends failed."""


def _call(name, *arguments):
    """Call a function of the C library; raises _FailedError unless it returns 0."""
    if _ctypes.call_function(_ctypes.dlsym(_libc, name), arguments) != 0:
        raise _FailedError(f"{name} failed")


def _mount(source, target, kind, flags, options=b""):
    try:
        _call("mount", source, target, kind, flags, options)
    except _FailedError:
        raise _FailedError(f"{target.decode()} could not be mounted") from None


def _supervisor():
    """Return the module of the supervisor, which the forks run."""
    with open("/run/supervisor.pyc", "rb") as file:
        code = marshal.loads(file.read()[16:])
    module = types.ModuleType("supervisor")
    exec(code, module.__dict__)
    return module


def _put(path, text):
    with open(path, "w") as file:
        file.write(text)


def _take_namespaces():
    """Enter new namespaces of every kind, where this user keeps its id and none can be created."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _EVERYTHING_NEW)
    _put("/proc/self/setgroups", "deny")
    _put("/proc/self/uid_map", f"{user} {user} 1")
    _put("/proc/self/gid_map", f"{group} {group} 1")
    _put("/proc/sys/user/max_user_namespaces", "0")


def _mount_own(disk_bytes):
    """Hide the file systems that forks would share behind new ones."""
    if not 0 < disk_bytes < _MAX_DISK:
        # The kernel would take what is left of it, and 0 for no limit.
        raise _FailedError(f"/tmp of {disk_bytes} bytes could not be mounted")
    _mount(b"none", b"/", b"", _PRIVATE)
    plain = _NO_SETUID | _NO_DEVICES
    _mount(b"proc", b"/proc", b"proc", plain | _NO_EXEC)
    _mount(b"/proc/sys", b"/proc/sys", b"", _BIND)
    _mount(b"none", b"/proc/sys", b"", _BIND | _REMOUNT | _READ_ONLY | plain | _NO_EXEC)
    terminals = b"newinstance,ptmxmode=0666,mode=620"
    _mount(b"devpts", b"/dev/pts", b"devpts", _NO_SETUID | _NO_EXEC, terminals)
    _mount(b"tmpfs", b"/dev/shm", b"tmpfs", plain, _SHARED_MEMORY)
    num_inodes = max(1024, disk_bytes // _BYTES_PER_INODE)
    own = f"mode=755,size={disk_bytes},nr_inodes={num_inodes}"
    _mount(b"tmpfs", b"/tmp", b"tmpfs", plain, own.encode())


def _raise_loopback():
    """Bring up the loopback interface of the new network."""
    one = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    request = b"lo".ljust(16, b"\0") + _UP_AND_RUNNING.to_bytes(2, sys.byteorder) + bytes(22)
    _call("ioctl", one.fileno(), _SET_INTERFACE_FLAGS, request)
    one.close()


def _give_up_rights(filter_):
    """Drop all capabilities for good, and install the filter of system calls."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _call("prctl", _DROP_BOUND, capability, 0, 0, 0)
    _call("prctl", _AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    head = _CAPABILITIES_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    _call("capset", head, bytes(24))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # The address of what bytes hold: their header ends before the terminating zero byte.
    held_at = id(filter_) + bytes.__basicsize__ - 1
    program = (len(filter_) // 8).to_bytes(8, sys.byteorder) + held_at.to_bytes(8, sys.byteorder)
    if sys.byteorder != "little":
        raise _FailedError("the filter is written for little-endian processors")
    _call("prctl", _SET_FILTER, _FILTER, program, 0, 0)
    _require_rights_are_gone()


def _require_rights_are_gone():
    """Check with the kernel that the isolation holds before a program may run."""
    with open("/proc/self/status") as file:
        said = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    wanted = {"NoNewPrivs": "1", "Seccomp": "2"}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        wanted[name] = "0" * 16
    for name, value in wanted.items():
        if said.get(name) != value:
            raise _FailedError(f"{name} is {said.get(name)}, not {value}")


def _answer(connection, kind, data):
    connection.sendall(kind + len(data).to_bytes(8, "big") + data)


def _sandbox(descriptor, limits, filter_):
    """Make this fork process 1 of a sandbox; returns only in that process."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 4096)
    connection = _socket.socket(fileno=descriptor)
    try:
        _take_namespaces()
        if os.fork():
            os._exit(0)
        os.setsid()
        # With it goes the process id, as the other end sees it.
        _answer(connection, b"p", b"")
        # Lists of processes show which are sandboxes, and how many seconds they live at most.
        _call("prctl", _SET_NAME, f"box-{limits[3]}".encode(), 0, 0, 0)
        _mount_own(limits[1])
        _raise_loopback()
        _give_up_rights(filter_)
        os.dup2(1, 2)
    except (_FailedError, OSError, ValueError) as error:
        _answer(connection, b"e", str(error).encode())
        os._exit(1)
    return connection.detach()


def _reaped(wakeups):
    """Reap forks that have ended; returns whether others remain."""
    try:  # noqa: SIM105 - contextlib would have to be imported
        os.read(wakeups, 4096)
    except BlockingIOError:
        pass
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    except ChildProcessError:
        return False


def serve(control):
    """Fork a sandbox for each request, until the connection ends or is idle for long.

    Returns the program that a fork's supervisor shall run.
    """
    supervisor = _supervisor()
    wakeups, wakers = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wakers, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda number, frame: None)
    connection = _socket.socket(fileno=control)
    filter_ = connection.recv(_MAX_REQUEST)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakeups, select.POLLIN)
    while True:
        ready = poll.poll(_IDLE_MS)
        if not _reaped(wakeups) and not ready:
            os._exit(0)
        if control not in dict(ready):
            continue
        data, extra, _, _ = connection.recvmsg(_MAX_REQUEST, _socket.CMSG_SPACE(4))
        if not data:
            os._exit(0)
        descriptor = int.from_bytes(extra[0][2][:4], sys.byteorder)
        limits = marshal.loads(data)
        try:
            child = os.fork()
        except OSError:
            child = -1
        if child == 0:
            connection.detach()
            held = _sandbox(descriptor, limits, filter_)
            return supervisor, supervisor.serve(held, *limits)
        os.close(descriptor)


def main(control):
    """Serve requests, and run the program in the fork that is to run one."""
    supervisor, program = serve(control)
    supervisor.run_program(program)


if __name__ == "__main__":
    main(int(sys.argv[1]))
