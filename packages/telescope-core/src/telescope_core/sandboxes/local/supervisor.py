"""Process 1 of a local sandbox: starts commands, reaps and ends them, reads and writes files.

It runs inside the sandbox, with the interpreter there, and imports only built-in modules, because
each import would delay every start. It holds no secret. Programs cannot end it, because it is
process 1, nor read or write its memory, because it is not dumpable and outside their Landlock
domain. A Python program runs in a fork of it, which saves starting an interpreter.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingImports=false, reportArgumentType=false
# The modules that it has to make do with have no types.
import _ctypes
import _signal
import _sitebuiltins
import _socket
import builtins
import errno
import marshal
import os
import resource
import select
import sys
import types

_PR_SET_DUMPABLE = 4
_RULESET_CREATE, _RULESET_ADD, _RESTRICT_SELF = 444, 445, 446
_READ, _ALL, _SCOPES = 0b1101, (1 << 16) - 1, 3
_RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_DEVICE_RIGHTS = 0b1110 | 1 << 14 | 1 << 15
"""Write, read, list; truncate; control a device."""
_WRITABLE = {"/tmp": _ALL, "/dev": _DEVICE_RIGHTS, "/dev/shm": _ALL, "/proc": 0b1110}
_CHUNK = 1 << 20

_libc = _ctypes.dlopen(None, 0)


def _call(name, *arguments):
    return _ctypes.call_function(_ctypes.dlsym(_libc, name), arguments)


def _syscall(*arguments):
    return _call("syscall", *arguments)


def landlock(writable):
    """Return a descriptor of Landlock's rules for programs, or -1 if the kernel has no Landlock.

    They repeat the restrictions of the mounts, so that one mistake in either is not enough.
    """
    abi = _syscall(_RULESET_CREATE, 0, 0, 1)
    if abi < 1:
        return -1
    known = _RIGHTS_OF_ABI.get(abi, _ALL)
    words = [known] + ([0] if abi >= 4 else []) + ([_SCOPES] if abi >= 6 else [])
    attributes = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
    rules = _syscall(_RULESET_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return -1
    for path, rights in {"/": _READ, **_WRITABLE, **dict.fromkeys(writable, _ALL)}.items():
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = (rights & known).to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
        if _syscall(_RULESET_ADD, rules, 1, rule, 0) < 0:
            return -1
        os.close(folder)
    return rules


def _receive(connection, size):
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), _CHUNK))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _next_request(connection):
    """Return a request and the descriptors that came with it."""
    head, extra, _, _ = connection.recvmsg(8, _socket.CMSG_SPACE(12))
    if not head:
        os._exit(0)
    head += _receive(connection, 8 - len(head))
    descriptors = []
    for level, kind, data in extra:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            whole = len(data) - len(data) % 4
            descriptors += [
                int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, whole, 4)
            ]
    return marshal.loads(_receive(connection, int.from_bytes(head, "big"))), descriptors


def _answer(connection, kind, data):
    connection.sendall(kind + len(data).to_bytes(8, "big") + data)


class Program:
    """A Python program that this process, a fork of the supervisor, is to run."""

    def __init__(self, code, arguments):
        self.code = code
        self.arguments = arguments


def _become(request, descriptors, rules, limits):
    """Start the program of a request: returns a Program, or replaces this process."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    try:
        _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        os.chdir(request["folder"])
        for kind, amount in limits:
            resource.setrlimit(kind, (amount, amount))
        if request["cpu_limits"]:
            resource.setrlimit(resource.RLIMIT_CPU, request["cpu_limits"])
        if rules >= 0 and _syscall(_RESTRICT_SELF, rules, 0) < 0:
            raise OSError("the rules of Landlock could not be put in force")
        os.closerange(3, 1024)
        argv, environment = request["argv"], request["environment"]
        # Python reads these variables only when it starts.
        is_told = any(name.startswith("PYTHON") for name in environment)
        if argv[:2] == ("python3", "-c") and len(argv) > 2 and not is_told:
            os.environ.clear()
            os.environ.update(environment)
            return Program(argv[2], ["-c", *argv[3:]])
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        os.execvpe(argv[0], argv, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"{request['argv'][0]}: {_said(error)}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, OSError) and error.errno != errno.EACCES else 126)


def _said(error):
    """Return one line about a request that the system, or Python before it, has refused."""
    if isinstance(error, UnicodeError):
        return "text with half of a surrogate pair"
    if isinstance(error, ValueError):
        return "text with a NUL character" if "null" in str(error) else str(error)
    return error.strerror or str(error)


def _end_all():
    """Kill and reap every other process of the sandbox."""
    while True:
        try:  # noqa: SIM105 - contextlib would have to be imported
            os.kill(-1, _signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _watch(connection, wakeups, child):
    """Return the wait status of `child` when it has ended; a request may kill it earlier."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    poll.register(wakeups, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wakeups:
                os.read(wakeups, 4096)
            else:
                request, _ = _next_request(connection)
                assert request["op"] == "kill", request
                os.kill(-1, _signal.SIGKILL)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == child:
                    return status
                if pid == 0:
                    break
        except ChildProcessError:
            return 0


def _run(connection, wakeups, request, descriptors, rules, limits):
    """Run one command; returns a Program in the process that is to run it, else None."""
    try:
        child = os.fork()
    except OSError as error:
        _answer(connection, b"e", f"cannot start a process: {error.strerror}".encode())
        return None
    if child == 0:
        return _become(request, descriptors, rules, limits)
    for descriptor in descriptors:
        os.close(descriptor)
    status = _watch(connection, wakeups, child)
    _end_all()
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    _answer(connection, b"s", str(code).encode())
    return None


def _read(path, most):
    # A pipe that the program put there would otherwise keep this process waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_mode & 0o170000 != 0o100000:
            raise OSError(errno.EINVAL, "not a file")
        parts, size = [], 0
        while True:
            part = os.read(descriptor, _CHUNK)
            if not part:
                return b"".join(parts)
            size += len(part)
            if size > most:
                raise OSError(errno.EFBIG, f"more than {most} bytes")
            parts.append(part)
    finally:
        os.close(descriptor)


def _write(path, content):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
    return b""


def _list(path):
    rows = []
    with os.scandir(path) as entries:
        for entry in entries:
            size = entry.stat(follow_symlinks=False).st_size if entry.is_file() else 0
            row = f"{int(entry.is_dir())} {size} ".encode() + os.fsencode(entry.name)
            rows.append(row)
    return b"\0".join(rows)


def _make_work():
    """Make the folder that commands start in, unless it is there: a program may remove it."""
    try:  # noqa: SIM105 - contextlib would have to be imported
        os.makedirs("/tmp/work", exist_ok=True)
    except OSError:  # a program left something else there, or no room: the request will say so
        pass


def _file_request(request):
    if request["op"] == "read":
        return _read(request["path"], request["most"])
    if request["op"] == "write":
        return _write(request["path"], request["content"])
    return _list(request["path"])


def _listen(connection):
    """Listen on a free port of this network namespace, and send the socket away.

    Its holder serves the network of the namespace from outside, without a process inside.
    """
    try:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
    except OSError as error:
        _answer(connection, b"e", str(error.strerror or error).encode())
        return
    port = str(listener.getsockname()[1]).encode()
    head = b"l" + len(port).to_bytes(8, "big")
    held = listener.fileno().to_bytes(4, sys.byteorder)
    connection.sendmsg([head + port], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, held)])
    listener.close()


def serve(descriptor, max_processes, max_file_bytes, max_address_bytes, time_to_live_s, *writable):
    """Answer requests until the connection ends; returns a Program in a process that is to run it.

    The kernel closes the other end when the process that made the sandbox is killed. A fork of that
    process would keep it open, so there is an end by time as well.
    """
    connection = _socket.socket(fileno=descriptor)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    wakeups, wakers = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wakers, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda number, frame: None)
    _signal.signal(_signal.SIGALRM, lambda number, frame: os._exit(0))
    _signal.alarm(time_to_live_s)
    _make_work()
    os.chdir("/tmp/work")
    resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))
    limits = [
        (resource.RLIMIT_FSIZE, max_file_bytes),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (getattr(resource, "RLIMIT_MSGQUEUE", 12), 0),
    ]
    if max_address_bytes:
        limits.append((resource.RLIMIT_AS, max_address_bytes))
    rules = landlock(writable)
    _answer(connection, b"r", b"1" if rules >= 0 else b"0")
    while True:
        request, descriptors = _next_request(connection)
        _make_work()
        if request["op"] == "run":
            program = _run(connection, wakeups, request, descriptors, rules, limits)
            if program is not None:
                return program
        elif request["op"] == "listen":
            _listen(connection)
        elif request["op"] != "kill":
            try:
                data, kind = _file_request(request), b"d"
            except (OSError, ValueError) as error:
                data, kind = _said(error).encode(), b"e"
            _answer(connection, kind, data)


def run_program(program):
    """Run a Python program as `python3 -c` would, with error messages that show the same frames."""
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.argv = program.arguments
    sys.path.insert(0, "")
    code = 0
    try:
        exec(compile(program.code, "<string>", "exec"), main.__dict__)
    except SystemExit as ended:
        code = _code_of(ended)
    except BaseException as error:  # noqa: BLE001 - it is the end of the program
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    _leave(main, code)


def _code_of(ended):
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 255
    sys.stderr.write(f"{ended.code}\n")
    return 1


def _leave(main, code):
    """End as the interpreter would: threads, exit functions, then the program's own objects.

    It leaves out taking down every module, which in a fork copies their memory and takes longer
    than most programs.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


if __name__ == "__main__":
    run_program(serve(*map(int, sys.argv[1:6]), *sys.argv[6:]))
