"""Programs that try to get out of a local sandbox, and a host on which it would show.

Run as a script, by whichever user, it reads as JSON which attack is tried in which kind of sandbox,
tries each and prints as JSON what came of it. It imports nothing but Telescope's sandboxes, so that
any Python of the machine can run it.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.protocol import CommandResult, Network, SandboxSpec

LIFE_S = 1_000_000 + os.getpid()
"""Seconds that nobody else's sandboxes live."""
MARK = str(LIFE_S + 30)
"""What the processes of sandboxes with that life are told by: how long at the very most."""
SPEC = SandboxSpec(memory_mb=192, disk_mb=16, max_processes=32, time_to_live_s=LIFE_S)
REPORT = (
    "\nexcept OSError as e: print('stopped', e.strerror or e)"
    "\nexcept MemoryError: print('stopped memory')"
)
TRY = {
    "network": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')"
    ),
    "network of the host by datagram": (
        "import socket; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.sendto(b'x', ('8.8.8.8', 53)); print('ESCAPED')"
    ),
    "socket of the virtual machine": "import socket; socket.socket(40, 1); print('ESCAPED')",
    "abstract socket": (
        "import socket; s=socket.socket(socket.AF_UNIX); s.connect('\\0{mark}'); print('ESCAPED')"
    ),
    "read outside": "print('ESCAPED', open('{secret}').read())",
    "read by a symlink": (
        "import os; os.symlink('{folder}', '/tmp/link'); print('ESCAPED', os.listdir('/tmp/link'))"
    ),
    "read accounts": "print('ESCAPED', len(open('/etc/shadow').read()))",
    "read packages of the interpreter": (
        "import glob; found=[f for p in {packages!r} for f in glob.glob(p+'/*')]; "
        "print('ESCAPED' if found else 'stopped', found[:3])"
    ),
    "write /proc/sys": (
        "f=open('/proc/sys/kernel/core_pattern','r+'); v=f.read(); f.seek(0); f.write(v); "
        "f.close(); print('ESCAPED')"
    ),
    "write /usr": "open('/usr/telescope-attack','w'); print('ESCAPED')",
    "write /dev": "open('/dev/telescope-attack','wb').write(b'x'*(1<<20)); print('ESCAPED')",
    "write the supervisor's code": "open('/run/supervisor.pyc','ab'); print('ESCAPED')",
    "disk": (
        "\n  for i in range(30): open(f'/tmp/{{i}}','wb').write(b'x'*(4<<20))\n  print('ESCAPED')"
    ),
    "disk by one file": (
        "\n  f=open('/tmp/big','wb',0)\n  for i in range(60): f.write(b'x'*(1<<20))\n"
        "  print('ESCAPED')"
    ),
    "shared memory": "open('/dev/shm/x','wb').write(b'x'*(64<<20)); print('ESCAPED')",
    "ptrace of the supervisor": (
        "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.ptrace(16,os.getppid(),0,0); "
        "print('ESCAPED' if r==0 else 'stopped '+os.strerror(ctypes.get_errno()))"
    ),
    "memory of the supervisor": "open('/proc/1/mem','r+b'); print('ESCAPED')",
    "files of the supervisor": (
        "import os; n=os.listdir('/proc/1/fd'); print('ESCAPED', n) if n else print('stopped')"
    ),
    "verdict through the supervisor's files": (
        "\n  import os, glob\n  for p in glob.glob('/proc/1/fd/*') or ['/proc/1/fd/3']:\n"
        "    open(p,'wb').write(b's'+(1).to_bytes(8,'big')+b'0')\n  print('ESCAPED')"
    ),
    "environment of others": (
        "import glob; found=[p for p in glob.glob('/proc/[0-9]*/environ') "
        "if b'{mark}' in open(p,'rb').read()]; print('ESCAPED' if found else 'stopped')"
    ),
    "signal to a process of the host": "import os; os.kill({pid}, 0); print('ESCAPED')",
    "new user namespace": (
        "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.unshare(0x10000000); "
        "print('ESCAPED' if r==0 else 'stopped '+os.strerror(ctypes.get_errno()))"
    ),
    "io_uring": (
        "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); "
        "r=l.syscall(425,8,ctypes.create_string_buffer(256)); "
        "print('ESCAPED' if r>=0 else 'stopped '+os.strerror(ctypes.get_errno()))"
    ),
    "root inside": "import os; os.setuid(0); print('ESCAPED')",
    "mount": (
        "import ctypes,os; l=ctypes.CDLL(None,use_errno=True); "
        "r=l.mount(b'tmpfs',b'/tmp',b'tmpfs',0,b''); "
        "print('ESCAPED' if r==0 else 'stopped '+os.strerror(ctypes.get_errno()))"
    ),
    "fork bomb": (
        "\n  import os, time\n  for i in range(150):\n    if os.fork()==0:\n      time.sleep(60)\n"
        "      os._exit(0)\n  print('ESCAPED')"
    ),
    "memory in one process": "b=bytearray(900<<20); print('ESCAPED')",
}
"""Attacks that print `ESCAPED` or `stopped`, or are killed, which is as good."""
ONE_OPENED = {
    f"{name}, with another address opened": name
    for name in (
        *("network", "network of the host by datagram", "socket of the virtual machine"),
        *("abstract socket", "signal to a process of the host", "files of the supervisor"),
    )
}
"""The same, from a sandbox to which one address of the host is opened."""
MEMORY_OF_MANY = """
import os, time
filled, fills = os.pipe()
ended, ends = os.pipe()
for i in range(8):
    if os.fork() == 0:
        os.close(ends)
        held = bytearray(100 << 20)
        for at in range(0, len(held), 4096): held[at] = 1
        os.write(1, b'held ')
        os.close(fills)
        os.read(ended, 1)
        os._exit(0)
os.close(fills)
os.read(filled, 1)
pid, status = os.waitpid(-1, os.WNOHANG)
if not os.WIFSIGNALED(status): time.sleep(60)
"""
"""Every process keeps its memory until all have theirs or were killed."""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(600)
    os._exit(0)
print('left')
"""
IGNORES = """
import signal, time
for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
print('on', flush=True)
while True: time.sleep(1)
"""
KILLS_ALL = "import os\nos.kill(1, 9)\nos.kill(-1, 9)\nprint('ESCAPED')"
FLOOD = "import sys\nwhile True: sys.stdout.write('y' * 100000)"
ALONE = {
    "memory in many processes": MEMORY_OF_MANY,
    "daemon by double fork": DAEMON,
    "ignored SIGTERM": IGNORES,
    "kill of everything": KILLS_ALL,
    "output flood": FLOOD,
}
"""Attacks that need nothing of the host; each is stopped in a way of its own."""
BOUNDS_S = (0.5, 8.0, 120.0)
"""How long a program without an end may run, until it came as far as it had to."""


async def tried_beside_an_opening(provider: LocalProvider, code: str) -> CommandResult:
    """Return how a program ended in a sandbox that reaches one server of the host, and no other."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    box = await provider.create(dataclasses.replace(SPEC, network=Network.ENDPOINT))
    try:
        async with box.opened("127.0.0.1", server.sockets[0].getsockname()[1]):
            return await box.run(["python3", "-c", code])
    finally:
        await box.close()
        server.close()


async def tried(provider: LocalProvider, code: str, *, timeout_s: float = 60.0) -> CommandResult:
    """Return how a program ended in a sandbox of its own, which is usable afterwards."""
    box = await provider.create(SPEC)
    try:
        done = await box.run(["python3", "-c", code], timeout_s=timeout_s)
        after = await box.run(["echo", "still here"])
        assert after.text == "still here\n", f"{code}: {done}, then {after}"
        return done
    finally:
        await box.close()


async def tried_until(provider: LocalProvider, code: str, num_bytes: int) -> CommandResult:
    """Return how a program without an end ended, with the first limit that let it say so much."""
    for timeout_s in BOUNDS_S:
        done = await tried(provider, code, timeout_s=timeout_s)
        if len(done.stdout) + done.num_dropped_bytes >= num_bytes:
            break
    return done


@contextlib.contextmanager
def host() -> Iterator[dict[str, object]]:
    """Yield what an attack would find on this machine: files, servers and processes."""
    mark = f"telescope-attack-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder, "answers").write_text("42")
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{mark}")
        abstract.listen()
        other = stack.enter_context(
            subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], "SECRET": mark})
        )
        stack.callback(other.kill)
        yield {
            "port": server.getsockname()[1],
            "mark": mark,
            "folder": folder,
            "secret": str(Path(folder, "answers")),
            "pid": other.pid,
        }


def processes_of(words: str) -> list[str]:
    """Return the processes of this machine whose command line or name has `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ")
            # One that has ended and waits to be reaped has a name, and no line.
            name = path.with_name("comm").read_bytes() if line else b""
            if words in (line + name).decode(errors="replace"):
                found.append(path.parent.name)
    return found


async def attempt(provider: LocalProvider, name: str, facts: dict[str, object]) -> CommandResult:
    """Return what came of one attack."""
    if name in ONE_OPENED:
        body = f"try: {TRY[ONE_OPENED[name]].format(**facts)}{REPORT}"
        return await tried_beside_an_opening(provider, body)
    if name in TRY:
        return await tried(provider, f"try: {TRY[name].format(**facts)}{REPORT}")
    if name in ("ignored SIGTERM", "output flood"):
        return await tried_until(provider, ALONE[name], 3 if name == "ignored SIGTERM" else 2 << 20)
    return await tried(provider, ALONE[name])


async def try_each(means: str, beginning: str, names: list[str]) -> dict[str, object]:
    """Try the attacks on one provider; returns what came of each, and what is left at the end."""
    provider = LocalProvider(
        use_control_groups=means == "groups", use_template=beginning == "forked"
    )
    ingredients = await provider._prepared()
    assert provider._uses_template == (beginning == "forked"), "no template could be had"
    results: dict[str, object] = {
        "measures": {limit.value: means for limit, means in provider.limits.items()}
    }
    with host() as facts:
        facts["packages"] = list(ingredients.interpreter.package_folders)
        for name in names:
            results[name] = said(await attempt(provider, name, facts))
    await provider.close()
    results["left"] = processes_of(MARK) + processes_of(f"of-{os.getpid()} ")
    return results


def said(done: CommandResult) -> dict[str, object]:
    """Return a result as JSON, with the beginning of its texts."""
    row = dataclasses.asdict(done)
    return {**row, "stdout": done.text[:300], "stderr": done.error_text[-300:]}


async def main() -> None:
    """Try what standard input asks for: a list of means, beginning and names of attacks."""
    for means, beginning, names in json.loads(sys.stdin.read()):
        came = await try_each(means, beginning, names)
        print(json.dumps({"uid": os.getuid(), **came}))


if __name__ == "__main__":
    asyncio.run(main())
