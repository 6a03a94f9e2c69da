"""The provider `local`: the checks of every provider, and what is its own."""

import asyncio
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.core.sandboxes.attacks import processes_of

from telescope_core.sandboxes import (
    Network,
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxSpec,
    SandboxUnavailableError,
    StopCause,
    open_provider,
)
from telescope_core.sandboxes.check import CHECKS, Subject
from telescope_core.sandboxes.local import cgroups, seccomp
from telescope_core.sandboxes.local.provider import LocalProvider


@pytest.fixture
async def provider():
    made = LocalProvider()
    yield made
    await made.close()


WAITING = {"timeout", "processor time", "cancelled command"}
"""Checks that wait for a second or two. The next test is about the one, test_escapes the other."""


@pytest.mark.parametrize(
    "check",
    [pytest.param(one, marks=[pytest.mark.slow] if one in WAITING else []) for one in CHECKS],
)
async def test_contract(shared, check):
    await CHECKS[check](Subject(provider=shared, spec=SandboxSpec()))


async def until_sleeping(length: str, number: int) -> None:
    """Wait until `number` processes of this machine sleep for so long."""
    async with asyncio.timeout(60):
        while len(processes_of(f"sleep {length}")) != number:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def test_a_command_that_is_cancelled_ends_and_the_sandbox_goes_on(box):
    length = f"76.{os.getpid()}"
    running = asyncio.create_task(box.run(["sleep", length]))
    await until_sleeping(length, 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert (await box.run(["echo", "on"])).text == "on\n"
    await until_sleeping(length, 0)


@pytest.mark.parametrize(("odd", "said"), [("a\0b", "NUL"), ("a\ud800b", "surrogate")])
async def test_text_that_the_system_cannot_take_is_refused_in_one_line(box, odd, said):
    commands = [
        (["echo", odd], None, None),
        ([odd], None, None),
        (["echo"], {"A": odd}, None),
        (["python3", "-c", ""], None, odd),
    ]
    for argv, environment, folder in commands:
        done = await box.run(argv, environment=environment, folder=folder)
        assert (done.exit_code, done.text) == (126, "")
        assert done.error_text.count("\n") == 1
        assert said in done.error_text
    for asked in (box.read(odd), box.write(odd, b"")):
        with pytest.raises(SandboxFileError, match=said):
            await asked
    assert (await box.run(["echo", "on"])).text == "on\n"


async def test_it_is_found_by_its_name():
    found = open_provider("local")
    assert isinstance(found, LocalProvider)
    await found.close()


async def test_full_network_is_refused_by_name(shared):
    """It would be the network of this machine, with every server that listens on its loopback."""
    with pytest.raises(SandboxLimitError, match="network=full"):
        await shared.create(SandboxSpec(network=Network.FULL))


async def test_nothing_is_opened_to_a_sandbox_without_network(box):
    with pytest.raises(SandboxLimitError) as refused:
        async with box.opened("127.0.0.1", 1):
            pytest.fail("it was opened")
    assert "network=none" in str(refused.value)
    assert "Network.ENDPOINT" in str(refused.value)


FLOOD = """
import socket, sys
port, held = int(sys.argv[1]), []
for number in range(200):
    held.append(socket.create_connection(("127.0.0.1", port), 30))
alive = 0
for one in held:
    one.settimeout(30)
    try:
        one.sendall(b"x")
        alive += one.recv(1) == b"y"
    except OSError:
        pass
print(alive)
"""


@pytest.mark.slow
async def test_what_is_opened_carries_so_many_connections_and_leaves_nothing(provider):
    """A program that floods it takes neither our files nor the room of the server behind."""
    num_open = most_open = 0

    async def answer(reader, writer):
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        try:
            if await reader.read(1):
                writer.write(b"y")
            await reader.read()
        finally:
            num_open -= 1
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    box = await provider.create(SandboxSpec(network=Network.ENDPOINT))
    before = len(os.listdir("/proc/self/fd"))
    async with box.opened("127.0.0.1", port) as address:
        done = await box.run(["python3", "-c", FLOOD, address.rpartition(":")[2]])
        assert 0 < int(done.text) <= 64, done
        assert most_open <= 64
    async with asyncio.timeout(60):
        while num_open or len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    server.close()


async def test_an_address_where_nobody_listens_is_a_refused_connection(shared):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    box = await shared.create(SandboxSpec(network=Network.ENDPOINT))
    code = (
        "import socket, sys\nwith socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as c:\n"
        "  try: print(c.recv(1))\n  except OSError: print('closed')"
    )
    async with box.opened("127.0.0.1", port) as address:
        done = await box.run(["python3", "-c", code, address.rpartition(":")[2]])
    assert done.text in ("b''\n", "closed\n"), done


async def test_one_that_is_cancelled_while_it_opens_answers_the_next_request(shared):
    box = await shared.create(SandboxSpec(network=Network.ENDPOINT))
    before = len(os.listdir("/proc/self/fd"))

    async def opens():
        async with box.opened("127.0.0.1", 1):
            await asyncio.Event().wait()

    for num_turns in range(12):
        opening = asyncio.create_task(opens())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        assert (await box.run(["echo", "on"])).text == "on\n"
    assert len(os.listdir("/proc/self/fd")) == before


async def test_what_a_program_leaves_in_memory_of_python_is_gone_for_the_next(box):
    code = "import sys, os\nsys.modules['json'] = 1\nos.environ['LEFT'] = '1'\nprint(__name__)"
    assert (await box.run(["python3", "-c", code])).text == "__main__\n"
    code = "import json, os\nprint(json.dumps({}), 'LEFT' in os.environ)"
    assert (await box.run(["python3", "-c", code])).text == "{} False\n"


@pytest.mark.slow
async def test_a_python_program_ends_as_it_would_by_itself(box):
    cases = {
        "exit(4)": (4, b""),
        "import sys; sys.exit('said')": (1, b"said\n"),
        "import atexit; atexit.register(print, 'at exit')": (0, b""),
        "import sys; sys.exit(257)": (1, b""),
        "class A:\n    def __del__(self): print('del')\na = A()": (0, b""),
        "import sys; sys.stdout.write('no newline')": (0, b""),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
        ): (0, b""),
        "raise KeyboardInterrupt": (130, b"KeyboardInterrupt"),
        "1/0": (1, b"ZeroDivisionError: division by zero"),
        "x = (": (1, b"SyntaxError"),
    }
    for code, (exit_code, error) in cases.items():
        done = await box.run(["python3", "-c", code])
        plain = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-ISc", code], capture_output=True, check=False
        )
        assert error in done.stderr, (code, done)
        assert done.exit_code == exit_code, (code, done)
        assert done.stdout == plain.stdout, (code, done)
        assert b"supervisor" not in done.stderr, (code, done)


async def test_a_thread_a_subprocess_and_multiprocessing_work(box):
    code = (
        "import threading, subprocess, multiprocessing as m\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout, end='')\n"
        "p = m.get_context('fork').Process(target=print, args=('process',)); p.start(); p.join()\n"
    )
    done = await box.run(["python3", "-c", code])
    assert (done.exit_code, done.text.split()) == (0, ["thread", "child", "process"]), done


async def test_a_server_inside_is_reached_from_inside(box):
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname(), 2)\nprint('reached')"
    )
    assert (await box.run(["python3", "-c", code])).text == "reached\n"


async def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(box):
    await box.run(["mkfifo", "pipe"])
    with pytest.raises(SandboxFileError, match="not a file"):
        await box.read("pipe")
    with pytest.raises(SandboxFileError):
        await box.write("pipe", b"x")


async def test_a_file_beyond_the_disk_is_refused(shared):
    box = await shared.create(SandboxSpec(disk_mb=1, memory_mb=64))
    with pytest.raises(SandboxFileError, match="No space"):
        await box.write("big", b"x" * (2 << 20))
    await box.close()


async def test_the_work_folder_is_made_again_where_a_program_removed_it(box):
    for remove in ("rm -rf /tmp/*", "rm -rf /tmp/work"):
        await box.run(["sh", "-c", remove])
        assert (await box.run(["pwd"])).text == "/tmp/work\n"
        await box.run(["sh", "-c", remove])
        await box.write("file", b"x")
        assert [one.name for one in await box.list(".")] == ["file"]
    await box.run(["sh", "-c", "rm -rf /tmp/work; echo text > /tmp/work"])
    done = await box.run(["pwd"])
    assert (done.exit_code, done.stderr) == (127, b"pwd: Not a directory\n")


async def test_the_number_of_files_is_limited_with_the_disk(shared):
    """Empty files take no room, but memory of the kernel."""
    box = await shared.create(SandboxSpec(disk_mb=16, memory_mb=64))
    code = "import os\nprint(*[os.statvfs(at).f_files for at in ('/tmp', '/dev/shm')])"
    assert (await box.run(["python3", "-c", code])).text == "4096 2048\n"
    await box.close()


@pytest.mark.slow
async def test_at_the_end_of_its_time_to_live_a_sandbox_ends_with_its_command(shared):
    box = await shared.create(SandboxSpec(time_to_live_s=0.3))
    done = await box.run(["sleep", "60"])
    assert (done.stop, done.exit_code) == (StopCause.SANDBOX_ENDED, 137)
    assert not box.is_alive
    assert (await box.run(["true"])).stop is StopCause.SANDBOX_ENDED


async def test_a_sandbox_that_dies_between_commands_is_the_failure_of_nobody_inside(shared):
    box = await shared.create(SandboxSpec())
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.run(["true"])


async def test_without_bubblewrap_it_refuses_with_what_to_install(monkeypatch, provider):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SandboxUnavailableError, match="install bubblewrap"):
        await provider.create(SandboxSpec())
    assert provider._open == set()


async def test_another_system_than_linux_is_refused_with_another_provider(monkeypatch, provider):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(SandboxUnavailableError, match="this is Darwin; take another provider"):
        await provider.create(SandboxSpec())
    assert provider._open == set()


async def test_where_no_namespaces_are_allowed_it_refuses_with_advice(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    found = shutil.which

    def which(name, path=None):
        return "/bin/false" if name == "bwrap" else found(name, path=path)

    monkeypatch.setattr(shutil, "which", which)
    provider = LocalProvider()
    with pytest.raises(SandboxUnavailableError, match="max_user_namespaces"):
        await provider.create(SandboxSpec())
    assert provider._open == set()


async def test_a_python_that_others_cannot_run_is_refused(tmp_path):
    hidden = tmp_path / "python3"
    hidden.write_text("")
    provider = LocalProvider(python=str(hidden))
    with pytest.raises(SandboxUnavailableError, match=re.escape(str(hidden))):
        await provider.create(SandboxSpec())
    assert provider._open == set()


KILLED = """
import asyncio, os, signal
from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.protocol import SandboxSpec

async def main():
    provider = LocalProvider()
    boxes = [await provider.create(SandboxSpec()) for _ in range(3)]
    await asyncio.wait([asyncio.create_task(box.run(["sleep", "LENGTH"])) for box in boxes])

asyncio.run(main())
"""


@pytest.mark.slow
async def test_when_this_process_is_killed_its_sandboxes_end():
    length = f"77.{os.getpid()}"
    code = KILLED.replace("LENGTH", length)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await until_sleeping(length, 3)
    child.kill()
    await child.wait()
    await until_sleeping(length, 0)


async def test_a_template_that_ends_takes_its_sandboxes_along_and_is_made_anew(provider):
    box = await provider.create(SandboxSpec())
    template = provider._template
    [first] = await asyncio.to_thread(_children, template._process.pid)
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while (await box.run(["true"])).stop is not StopCause.SANDBOX_ENDED:
            pass
    again = await provider.create(SandboxSpec())
    assert (await again.run(["echo", "on"])).text == "on\n"
    assert provider._template is not template


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_sandboxes_of_one_template_share_no_files_terminals_or_processes(shared):
    """What a fork did not replace would be the same one in each."""
    one, other = [await shared.create(SandboxSpec()) for _ in range(2)]
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    code = f"import os\nprint(*[os.readlink('/proc/self/ns/' + kind) for kind in {kinds}])"
    found = [(await box.run(["python3", "-c", code])).text.split() for box in (one, other)]
    assert all(first != second for first, second in zip(*found, strict=True)), found
    code = (
        "import os\nfor at in ('/tmp/work', '/dev/shm'): open(at + '/left', 'w').close()\n"
        "pair = os.openpty()\nprint(os.ttyname(pair[1]), *sorted(os.listdir('/dev/pts')))\n"
        "print(*[n for at in ('/proc', '/tmp', '/dev/shm', '/dev/pts', '/dev/mqueue')"
        " if os.path.isdir(at) for n in sorted(os.listdir(at)) if n.isdigit() or n == 'left'])"
    )
    said = [(await box.run(["python3", "-c", code])).text for box in (one, other)]
    assert said[0] == said[1], said
    assert said[0].startswith("/dev/pts/0 0 ptmx\n1 "), said


async def test_a_fork_that_cannot_become_a_sandbox_says_why_and_runs_nothing(provider):
    """A disk of a size that no file system has, which the kernel would take for no limit.

    `create` refuses it before; a fork does not rely on that.
    """
    await (await provider.create(SandboxSpec())).close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match=r"/tmp of \d+ bytes could not be mounted"):
        await provider._create(provider._ingredients, SandboxSpec(disk_mb=1 << 60))
    assert len(os.listdir("/proc/self/fd")) == before
    assert (await (await provider.create(SandboxSpec())).run(["echo", "on"])).text == "on\n"


@pytest.fixture(params=["/tmp", "/dev/shm"])
def covered(request):
    """A file where every sandbox has files of its own."""
    with tempfile.TemporaryDirectory(dir=request.param) as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "said"
        file.write_text("seen")
        yield file


async def test_what_a_fork_would_cover_is_seen_all_the_same(covered):
    provider = LocalProvider(read_only=(str(covered.parent),))
    box = await provider.create(SandboxSpec())
    try:
        found = await box.run(["cat", str(covered)])
        assert (found.exit_code, found.stdout) == (0, b"seen")
    finally:
        await provider.close()


async def test_python_reads_its_own_variables_in_a_sandbox(provider):
    box = await provider.create(SandboxSpec())
    code = "import sys; print(sys.flags.hash_randomization)"
    for variables, printed in (({}, "1\n"), ({"PYTHONHASHSEED": "0"}, "0\n")):
        done = await box.run(["python3", "-c", code], environment=variables)
        assert done.text == printed


async def test_a_path_to_read_that_is_not_there_is_named_and_no_limit_of_the_machine(tmp_path):
    missing = str(tmp_path / "agents")
    provider = LocalProvider(read_only=(missing,))
    with pytest.raises(SandboxUnavailableError, match=re.escape(missing)) as raised:
        await provider.create(SandboxSpec())
    assert "user namespaces" not in str(raised.value)


async def test_where_no_template_can_be_had_bubblewrap_starts_each(monkeypatch, provider):
    def words(*given):
        return ["/bin/sh", "-c", "echo no capabilities here >&2; exit 1"]

    monkeypatch.setattr("telescope_core.sandboxes.local.started.template_words", words)
    box = await provider.create(SandboxSpec())
    assert box.measures["start"] == "bubblewrap for each"
    assert (await box.run(["echo", "on"])).text == "on\n"


def test_groups_of_processes_that_are_gone_are_removed(tmp_path):
    own = f"telescope-sandbox-{os.getpid()}-{cgroups.process_started(os.getpid())}-1"
    for name in ("telescope-sandbox-999999999-12-1", own, "other"):
        (tmp_path / name).mkdir()
    cgroups._remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", own]


def interpreted(program: bytes, kind: str, number: int, first: int = 0) -> int:
    """What a filter answers to a system call: a slow and obvious reading of classic BPF."""
    data = {0: number, 4: {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[kind], 16: first}
    at, word = 0, 0
    while True:
        line = program[at * 8 : at * 8 + 8]
        code, if_true, if_false = int.from_bytes(line[:2], "little"), line[2], line[3]
        value = int.from_bytes(line[4:], "little")
        at += 1
        if code == 0x20:
            word = data[value]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(kind):
    program = seccomp.program_for(kind)
    allow, error = 0x7FFF0000, 0x00050000
    denied = {*seccomp._DENIED[kind], *seccomp._SHARED}
    special = {seccomp._SOCKET[kind], seccomp._SOCKET_PAIR[kind], seccomp._CLONE3}
    for number in range(470):
        if number in denied:
            assert interpreted(program, kind, number) == error | 1, number
        elif number not in special:
            assert interpreted(program, kind, number) == allow, number
    assert interpreted(program, kind, seccomp._CLONE3) == error | 38
    assert interpreted(program, kind, seccomp._CLONE[kind], 0x10000011) == error | 1
    assert interpreted(program, kind, seccomp._CLONE[kind], 0x01200011) == allow
    for call in (seccomp._SOCKET[kind], seccomp._SOCKET_PAIR[kind]):
        answers = {first: interpreted(program, kind, call, first) for first in range(45)}
        assert {first for first, answer in answers.items() if answer == allow} == {1, 2, 10}
        assert set(answers.values()) == {allow, error | 97}
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[kind]
    assert interpreted(program, other, 0) == 0x80000000


def test_memory_is_counted_with_that_of_children():
    from telescope_core.sandboxes.local.sandbox import held_bytes

    code = "import os, sys; held = b'x' * (40 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{code}"; true'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    assert held_bytes(child.pid) > 40 << 20
    child.stdin.close()
    child.stdout.close()
    child.wait()
    assert not Path(f"/proc/{child.pid}").exists()
    assert held_bytes(child.pid) == 0


async def test_further_folders_can_be_written_and_nothing_else_can():
    """As tasks expect it whose programs write to folders of their image."""
    provider = LocalProvider(writable=("/app", "/logs"))
    try:
        box = await provider.create(SandboxSpec(disk_mb=8, memory_mb=128))
        await box.write("/app/part/one", b"1")
        done = await box.run(["sh", "-c", "cd part && pwd && echo 2 > /logs/x"], folder="/app")
        assert (done.text, done.error_text) == ("/app/part\n", "")
        assert await box.read("/logs/x") == b"2\n"
        for path in ("/x", "/usr/x", "/other/x"):
            assert not (await box.run(["sh", "-c", f"echo > {path}"])).succeeded
        fill = "open('/app/x', 'wb').write(b'x' * (7 << 20) + b'y' * (2 << 20))"
        assert not (await box.run(["python3", "-c", fill])).succeeded
        other = await provider.create(SandboxSpec(memory_mb=128))
        assert await other.list("/app") == []
    finally:
        await provider.close()
