"""The watchdog: groups of processes end with the process that started it, and only with it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from tests.processes import Program, command_of

pytestmark = pytest.mark.slow
LIMIT_S = 60
PROGRAM = """
import subprocess, sys
from telescope_train.cluster.leftovers import Watchdog

guarded = subprocess.Popen(["sleep", "600"], start_new_session=True)
watchdog = Watchdog([guarded.pid])
print(guarded.pid, flush=True)
sys.stdin.readline()
watchdog.end()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def host():
    with Program(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        guarded = psutil.Process(int(process.stdout.readline()))
        kills = f"kill -KILL -{guarded.pid};"
        (watchdog,) = (
            one for one in psutil.process_iter() if any(kills in word for word in command_of(one))
        )
        yield process, guarded, watchdog
        process.kill()
        with suppress(psutil.NoSuchProcess):
            guarded.kill()


def has_ended(process: psutil.Process) -> bool:
    try:
        process.wait(LIMIT_S)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_killed_process_takes_its_groups_along(host):
    process, guarded, watchdog = host
    # As systemd tells every process of a job, and a terminal every one of a group.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(watchdog.pid, number)
    process.kill()
    assert has_ended(guarded)
    assert has_ended(watchdog)


def test_one_that_ended_its_watchdog_leaves_them(host):
    process, guarded, watchdog = host
    print(file=process.stdin, flush=True)
    assert process.stdout.readline() == "ended\n"
    assert has_ended(watchdog)
    assert guarded.is_running()


def test_a_watchdog_that_somebody_killed_is_no_error(host):
    process, _, watchdog = host
    watchdog.kill()
    assert has_ended(watchdog)
    print(file=process.stdin, flush=True)
    assert process.stdout.readline() == "ended\n"
