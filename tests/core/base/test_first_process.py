"""The first process of a container: it waits for orphans, and hands signals and codes on."""

import os
import signal
import subprocess
import sys

import pytest

LIMIT_S = 60
PROGRAM = """
import ctypes, os, select, signal, subprocess, sys
from telescope_core.base.first_process import go_on_in_child

ctypes.CDLL(None).prctl(36, 1)  # orphans come to this process, as to the first of a container
first = os.getpid()
go_on_in_child()
assert os.getppid() == first
%s
"""


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM % code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_it_ends_with_the_code_of_its_child(end, code):
    with started(end) as process:
        assert process.wait(LIMIT_S) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_reach_the_child_with_a_handler_or_without(number):
    # Python calls a handler between two steps of a program: a signal just before a call that waits
    # would be seen only after it, so no call waits for long.
    handler = (
        f"signal.signal({int(number)}, lambda *_: (print('told', flush=True), os._exit(5)))\n"
        "print('ready', flush=True)\n"
        "while not select.select([sys.stdin], [], [], 0.05)[0]: pass\nos._exit(0)"
    )
    with started(handler) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "told\n"
        assert process.wait(LIMIT_S) == 5
    without = f"signal.signal({int(number)}, signal.SIG_DFL)\n{handler.partition(chr(10))[2]}"
    with started(without) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number


def test_orphans_that_end_are_no_zombies():
    """Each is started by a shell that has ended, and tells its id before it ends."""
    code = """
ids = [subprocess.run(["sh", "-c", "(exec sleep 0) & echo $!"], stdout=subprocess.PIPE,
       text=True).stdout for _ in range(5)]
print(*(one.strip() for one in ids), flush=True)
sys.stdin.readline()
"""
    with started(code) as process:
        ids = [int(one) for one in process.stdout.readline().split()]
        assert len(ids) == 5
        give_up = 10_000
        while any(os.path.exists(f"/proc/{one}") for one in ids):
            give_up -= 1
            assert give_up, "they stay"
            os.sched_yield()
            signal.sigtimedwait([], 0.01)
        process.communicate("\n", timeout=LIMIT_S)
    assert process.returncode == 0
