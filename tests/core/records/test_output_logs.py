"""What processes print: whole lines with time and level, of bounded size, and nobody waits."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telescope_core.records.logs import NUM_OLD, log_files, log_name
from telescope_core.records.output_logs import (
    ENVIRONMENT_OUTPUT,
    INFERENCE,
    OutputLog,
    first_error,
    is_output,
)

DEADLINE_S = 300.0


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def printed(script: str, log: OutputLog) -> None:
    """Run a script to its end, and read all that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-ISc", script], stdout=log.fd, stderr=subprocess.STDOUT
    )
    log.begin()
    assert process.wait(DEADLINE_S) == 0
    log.drain(DEADLINE_S)
    log.close()


def until(is_true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_each_line_says_when_who_and_how_serious(tmp_path: Path):
    path = tmp_path / log_name(INFERENCE, "1")
    before_s = time.time()
    script = r"""
print("(APIServer pid=7) INFO 11-24 07:27:42 [api.py:1] ready")
print("WARNING 11-24 07:27:43 [a.py:2] slow\n  for a reason")
print("ERROR 11-24 07:27:44 boom\nTraceback (most recent call last):\nValueError: \xe9 \u4e00")
print("2026-11-24 07:27:45 on we go")
print("10%\r50%\r100%\r")
print("no end", end="", flush=True)
"""
    printed(script, log := OutputLog(path, component=INFERENCE, source="1"))
    rows = rows_of(path)
    assert [(row["level"], row["message"]) for row in rows] == [
        ("info", "(APIServer pid=7) INFO 11-24 07:27:42 [api.py:1] ready"),
        ("warning", "WARNING 11-24 07:27:43 [a.py:2] slow"),
        ("warning", "  for a reason"),
        ("error", "ERROR 11-24 07:27:44 boom"),
        ("error", "Traceback (most recent call last):"),
        ("error", "ValueError: \xe9 \u4e00"),
        ("info", "2026-11-24 07:27:45 on we go"),
        ("info", "100%"),
        ("info", "no end"),
    ]
    for row in rows:
        assert list(row) == ["time_s", "level", "component", "source", "life", "message"]
        assert (row["component"], row["source"], row["life"]) == (INFERENCE, "1", 1)
        assert before_s <= row["time_s"] < before_s + DEADLINE_S
    assert log.tail(2) == "100%\nno end"
    printed("print('again')", OutputLog(path, component=INFERENCE, source="1"))
    assert rows_of(path)[-1]["life"] == 2


@pytest.mark.slow
def test_a_log_is_of_bounded_size_however_much_is_printed(tmp_path: Path):
    path = tmp_path / "inference-0.jsonl"
    log = OutputLog(path, component=INFERENCE, max_bytes=50_000)
    printed("for n in range(5000): print('line', n, 'x' * 40)\nprint('y' * 10**5)", log)
    (files,) = log_files(tmp_path.iterdir())
    assert len(files.paths) == NUM_OLD + 1
    # A line that is longer than a log takes is cut in its middle.
    assert all(one.stat().st_size <= 70_000 for one in files.paths)
    numbers = [
        int(row["message"].split()[1])
        for one in files.paths
        for row in rows_of(one)
        if row["message"].startswith("line")
    ]
    assert numbers == list(range(numbers[0], 5000))
    assert log.num_bytes > 10**5


def test_text_stays_text_in_a_file_that_is_no_log_of_lines(tmp_path: Path):
    path = tmp_path / "server.log"
    printed(
        "print('hello')\nprint('INFO all s3cret-value well')",
        OutputLog(path, hide=["s3cret-value"]),
    )
    first, second = path.read_text().splitlines()
    assert first == "hello"
    assert second == "INFO all (left out) well"


def test_secrets_are_left_out_of_the_log_and_of_what_errors_quote(tmp_path: Path):
    path = tmp_path / "inference-0.jsonl"
    printed("print('key: s3cret-value')", log := OutputLog(path, hide=["s3cret-value"]))
    assert "s3cret-value" not in path.read_text() + log.tail(9)
    assert "key: (left out)" in log.tail(9)


def test_without_a_path_the_last_lines_are_kept(tmp_path: Path):
    printed("for n in range(100): print(n)", log := OutputLog(None))
    assert log.tail(3) == "97\n98\n99"


def test_a_disk_that_takes_nothing_holds_up_no_process(tmp_path: Path):
    path = tmp_path / "inference-0.jsonl"
    path.mkdir()  # so that it cannot be opened as a file
    log = OutputLog(path, component=INFERENCE)
    printed("for n in range(5000): print('line', n)", log)
    assert log.tail(1) == "line 4999"


@pytest.mark.slow
def test_what_has_no_end_yet_is_there_while_the_process_lives_on(tmp_path: Path):
    path = tmp_path / "inference-0.jsonl"
    log = OutputLog(path, component=INFERENCE)
    process = subprocess.Popen(
        [sys.executable, "-ISc", "print('password: ', end='', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=log.fd,
    )
    log.begin()
    until(lambda: any(row["message"] == "password: " for row in rows_of(path)))
    assert log.is_open
    process.communicate(b"x\n", timeout=DEADLINE_S)
    until(lambda: not log.is_open)
    log.close()


@pytest.mark.slow
def test_closing_waits_for_no_grandchild_that_holds_the_pipe(tmp_path: Path):
    log = OutputLog(tmp_path / "inference-0.jsonl", component=INFERENCE)
    held = os.dup(log.fd)  # as a process that was left behind would have it
    log.begin()
    os.write(held, b"last words\n")
    log.close()
    until(lambda: not log.is_open)
    assert log.tail(1) == "last words"
    log.close()
    with pytest.raises(BrokenPipeError):
        os.write(held, b"nobody reads this\n")
    os.close(held)


def test_a_log_that_was_never_begun_leaves_nothing_open(tmp_path: Path):
    before = len(os.listdir("/dev/fd"))
    OutputLog(tmp_path / "inference-0.jsonl", component=INFERENCE).close()
    assert len(os.listdir("/dev/fd")) == before


def test_which_logs_are_output():
    assert is_output(log_name(INFERENCE, "0"))
    assert is_output(log_name(ENVIRONMENT_OUTPUT, "maze 0"))
    assert is_output("server.log")
    assert not is_output("driver.jsonl")
    assert not is_output(log_name("environment", "maze 0"))


@pytest.mark.parametrize(
    ("printed", "first"),
    [
        (
            "INFO: fine\nTraceback (most recent call last):\n  File 'a', line 1, in f\n    g()\n"
            "OSError: no such device\n\nDuring handling of the above exception, another exception "
            "occurred:\n\nTraceback (most recent call last):\n  File 'b'\nRuntimeError: engine\n",
            "OSError: no such device",
        ),
        ("terminate called after throwing\nwhat(): x\n*** SIGABRT received at", "terminate called"),
        ("RuntimeError: caught and told by somebody\nall is well\n", ""),
        ("Traceback (most recent call last):\n  File 'a'\n", ""),
        ("", ""),
    ],
)
def test_the_first_error_is_found_among_what_was_printed(printed: str, first: str):
    assert first_error(printed).startswith(first)
    assert bool(first_error(printed)) == bool(first)
