"""Commands that a signal asks to end: what they say, how they end, and what they clean up."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.processes import Program
from tests.signals import heed_all_but

from telescope_core.evals import EvalFolder
from telescope_core.records import RunState

pytestmark = pytest.mark.slow
TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
LIMIT_S = 60
VERBS = '''
import asyncio
import os
import signal
import sys
import time

from telescope_cli.main import VERBS, main
from telescope_cli.verbs import Verb
from telescope_core.base.interruptible import run


def play() -> None:
    """Wait on an event loop, and clean up for as long as the test likes."""

    async def wait() -> None:
        print("ready", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("cleaning", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print("clean", flush=True)

    run(wait())


def sleep() -> None:
    """Wait without an event loop."""
    print("ready", flush=True)
    # A handler is called between two steps of a program: a signal just before a call that waits is
    # seen only after it.
    while True:
        time.sleep(0.05)


def tidy() -> None:
    """Wait without an event loop, and clean up."""
    try:
        sleep()
    finally:
        print("cleaning", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        print("clean", flush=True)


if __name__ == "__main__":
    for name in ("play", "sleep", "tidy"):
        VERBS[name] = Verb(target=f"verbs:{name}", help=name)
    main()
'''


@contextmanager
def running(
    folder: Path, verb: str, *, ignored: int | None = None, before: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen]:
    (folder / "verbs.py").write_text(VERBS)
    process = subprocess.Popen(
        [*before, sys.executable, "verbs.py", verb],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(heed_all_but, ignored),
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [TERM, HUP, INT])
@pytest.mark.parametrize("verb", ["play", "tidy"])
def test_cleaning_ends_in_order_though_more_signals_come(
    tmp_path: Path, verb: str, number: int
) -> None:
    with running(tmp_path, verb) as process:
        process.send_signal(number)
        assert process.stdout.readline() == "cleaning\n"
        assert process.stderr.readline().startswith("telescope: stopping")
        for again in (INT, TERM, INT):
            process.send_signal(again)
            assert f"kill -KILL {process.pid}" in process.stderr.readline()
        (tmp_path / "go").touch()
        out, errors = process.communicate("\n", timeout=LIMIT_S)
    assert out == "clean\n"
    assert errors == f"telescope: interrupted by {signal.Signals(number).name}\n"
    assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [TERM, HUP, INT])
def test_what_has_no_loop_ends_at_once(tmp_path: Path, number: int) -> None:
    with running(tmp_path, "sleep") as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    name = signal.Signals(number).name
    assert errors.splitlines() == [
        f"telescope: stopping ({name}) ...",
        f"telescope: interrupted by {name}",
    ]
    assert process.returncode == 128 + number


@pytest.mark.parametrize("verb", ["play", "sleep"])
def test_what_a_shell_has_ignored_stays_ignored_and_sigterm_ends_it(
    tmp_path: Path, verb: str
) -> None:
    with running(tmp_path, verb, ignored=INT) as process:
        process.send_signal(INT)
        process.send_signal(TERM)
        _, errors = process.communicate("\n", timeout=LIMIT_S)
    assert "SIGINT" not in errors
    assert process.returncode == 128 + TERM


NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"]).returncode != 0,
    reason="this machine lets nobody make a namespace of processes",
)
@pytest.mark.parametrize("verb", ["play", "sleep"])
def test_the_first_process_of_a_container_ends_in_order(tmp_path: Path, verb: str) -> None:
    with running(tmp_path, verb, before=NAMESPACE) as process:
        (first,) = psutil.Process(process.pid).children()
        (command,) = first.children()
        first.send_signal(TERM)
        _, errors = process.communicate("\n", timeout=LIMIT_S)
    assert errors.splitlines()[-1] == "telescope: interrupted by SIGTERM"
    assert process.returncode == 128 + TERM
    assert not command.is_running()


def test_a_terminal_that_is_gone_takes_no_words(tmp_path: Path) -> None:
    with running(tmp_path, "play") as process:
        process.stderr.close()
        process.send_signal(HUP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(LIMIT_S) == 128 + HUP
    assert not os.path.exists(f"/proc/{process.pid}")


WAITING = """
import asyncio
from pathlib import Path

from telescope_core import SingleTurnEnvironment, reward


class Waits(SingleTurnEnvironment):
    data = ("1", "2")

    @reward
    async def correct(self, completion):
        Path(__file__).with_name("ready").touch()
        await asyncio.Event().wait()
"""


@pytest.mark.parametrize("number", [TERM, INT])
def test_an_eval_records_its_end_and_says_how_it_goes_on(
    tmp_path: Path, endpoint: tuple[str, object], number: int
) -> None:
    url, _ = endpoint
    (tmp_path / "waits.py").write_text(WAITING)
    command = [sys.executable, "-c", "from telescope_cli.main import main; main()"]
    command += ["eval", "./waits.py:Waits", "--base-url", url, "--rollouts", "1"]
    with Program(
        [*command, "--output", "my out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            give_up_s = time.monotonic() + LIMIT_S
            while not (tmp_path / "ready").exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < give_up_s
                time.sleep(0.05)
            process.send_signal(number)
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    last = errors.splitlines()[-1]
    assert f"interrupted by {name}" in last
    assert "--output 'my out' --resume" in last
    info = EvalFolder(tmp_path / "my out").info()
    assert (info.state, info.reason) == (RunState.INTERRUPTED, f"interrupted by {name}")
    assert info.ended_at


@pytest.mark.parametrize("number", [TERM, HUP, INT])
def test_a_signal_after_the_end_changes_nothing_of_it(number):
    """Libraries undo for seconds what they did, when all is written and the exit code is known."""
    program = (
        f"import atexit, os; atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
        "from telescope_cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=heed_all_but,
    )
    assert (done.returncode, done.stderr) == (0, "")


ENDS = """
import atexit, ctypes, sys
from telescope_cli.main import main

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # what a library of C++ does at the end
atexit.register(lambda: print("undone"))
left_open = open("left_open", "w")
left_open.write("whole")
print("begun")
main()
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["eval", "compare", "no", "no"], 2)]
)
def test_a_library_that_crashes_at_the_end_changes_neither_code_nor_output(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    command = [sys.executable, "-c", ENDS, *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == code
    lines = done.stdout.decode().splitlines()
    assert (lines[0], lines[-1]) == ("begun", "undone")
    assert (tmp_path / "left_open").read_text() == "whole"


PRINTS_LATE = """
import atexit, contextlib
from telescope_cli.main import main

def print_late():
    with contextlib.suppress(OSError):
        print("late")

atexit.register(print_late)
main()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--version"], 1, "No space left"), (["eval", "compare", "no", "no"], 2, "no such folder")],
)
def test_an_output_that_cannot_be_written_is_said_in_one_line(
    arguments: list[str], code: int, words: str, unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS_LATE, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert words in line


def test_a_pipe_that_is_closed_early_is_no_error_to_speak_of() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", PRINTS_LATE, "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        timeout=LIMIT_S,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
