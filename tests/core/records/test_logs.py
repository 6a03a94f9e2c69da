"""Logs of processes: every line is whole and says who wrote it, and no failure gets out."""

import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.records.logs import (
    MAX_LINE_BYTES,
    NUM_OLD,
    JsonLines,
    Logs,
    base_name,
    hide_in_logs,
    last_life,
    line_of,
    log_files,
    log_name,
    telling_failure,
)

LOG = logging.getLogger("telescope_core.some.module")


@contextmanager
def bare_root() -> Iterator[None]:
    """Give the root logger as a new process has it, without what the tests' own runner adds."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
        assert root.handlers == []
    finally:
        root.handlers = handlers


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_who_and_what(tmp_path: Path):
    with Logs(folder=tmp_path).begin("trainer", "rank 3"):
        LOG.info("%d steps", 7)
        LOG.debug("never mind")
        logging.getLogger("httpx").info("a request")
        logging.getLogger("httpx").warning("a slow request")
        logging.getLogger("somebody.else").critical("help")
    LOG.warning("after the end")
    begun, *rows = lines_of(tmp_path / "trainer-rank-3.jsonl")
    assert begun["message"].startswith("process ")
    assert [(row["level"], row["message"]) for row in rows] == [
        ("info", "7 steps"),
        ("warning", "a slow request"),
        ("error", "help"),
    ]
    for row in rows:
        assert list(row) == ["time_s", "level", "component", "source", "life", "message"]
        assert (row["component"], row["source"], row["life"]) == ("trainer", "rank 3", 1)
        assert begun["time_s"] <= row["time_s"] < begun["time_s"] + 60


def test_debug_messages_are_those_of_own_code(tmp_path: Path):
    with Logs(folder=tmp_path, is_debug=True).begin("driver"):
        LOG.debug("details")
        logging.getLogger("somebody.else").debug("noise")
    assert [row["message"] for row in lines_of(tmp_path / "driver.jsonl")][1:] == ["details"]
    assert not LOG.isEnabledFor(logging.DEBUG)


def test_warnings_and_tracebacks_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # Within the runner's own way to catch warnings.
    with bare_root(), warnings.catch_warnings(), Logs(folder=tmp_path).begin("driver"):
        warnings.simplefilter("always")
        warnings.warn("this is old", DeprecationWarning, stacklevel=1)
        with pytest.raises(KeyError), telling_failure(LOG, "the step"):
            raise KeyError("reward")
        with pytest.raises(KeyboardInterrupt), telling_failure(LOG, "the step"):
            raise KeyboardInterrupt
    warned, failed, interrupted = lines_of(tmp_path / "driver.jsonl")[1:]
    assert "DeprecationWarning: this is old" in warned["message"]
    assert failed["level"] == "error"
    assert failed["message"].startswith("the step failed\nTraceback")
    assert failed["message"].endswith("KeyError: 'reward'")
    assert interrupted["message"] == "the step was interrupted (KeyboardInterrupt)"
    # As without a log: Python shows warnings, and an exception is shown by who catches it.
    shown = capsys.readouterr().err
    assert "this is old" in shown
    assert "the step failed" not in shown


def test_secrets_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", "key-of-the-environment")
    with Logs(folder=tmp_path).begin("driver", secrets=["of-the-settings"]):
        hide_in_logs(["learned-later", ""])
        LOG.info("Authorization: key-of-the-environment, of-the-settings, learned-later")
        with pytest.raises(ValueError, match="learned"), telling_failure(LOG, "asking"):
            raise ValueError("no access with learned-later")
    text = (tmp_path / "driver.jsonl").read_text()
    assert "Authorization: (left out), (left out), (left out)" in text
    assert "no access with (left out)" in text
    for secret in ("key-of-the-environment", "of-the-settings", "learned-later"):
        assert secret not in text


def test_each_start_is_a_life_also_after_a_kill_and_a_full_file(tmp_path: Path):
    path = tmp_path / "driver.jsonl"
    for life in (1, 2):
        with Logs(folder=tmp_path).begin("driver") as log:
            assert lines_of(path)[-1]["life"] == life
    with path.open("a") as stream:
        stream.write('{"time_s":1,"life":2,"mess')
    with Logs(folder=tmp_path).begin("driver") as log:
        log.next_life()
        LOG.info("again")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["life"] for line in lines if line.endswith("}")] == [1, 2, 3, 4]
    path.rename(tmp_path / "driver.1.jsonl")
    assert last_life(path) == 4


def test_full_files_are_renamed_and_the_oldest_ones_removed(tmp_path: Path):
    path = tmp_path / "driver.jsonl"
    handler = JsonLines(path, component="driver", max_bytes=2000)
    for number in range(200):
        handler.handle(record(f"number {number}"))
    handler.close()
    (files,) = log_files(tmp_path.iterdir())
    names = [f"driver.{number}.jsonl" for number in range(NUM_OLD, 0, -1)]
    assert [path.name for path in files.paths] == [*names, "driver.jsonl"]
    messages = [row["message"] for path in files.paths for row in lines_of(path)]
    assert messages == [f"number {number}" for number in range(200 - len(messages), 200)]
    assert all(one.stat().st_size <= 2000 for one in files.paths)


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "x.py", 1, message, None, None)


@settings(max_examples=25)
@given(message=st.text(max_size=400).map(lambda text: text * 100))
def test_a_line_has_a_limit_and_keeps_both_ends(message: str):
    line = line_of({"time_s": 1.0}, message)
    assert len(line.encode()) < MAX_LINE_BYTES
    found = json.loads(line)["message"]
    if found != message:
        before, told, after = found.partition(" characters are left out ...\n")
        head, _, number = before.rpartition("\n... ")
        assert told
        assert message.startswith(head)
        assert message.endswith(after)
        assert len(head) + int(number) + len(after) == len(message)


def test_many_threads_write_whole_lines(tmp_path: Path):
    with Logs(folder=tmp_path).begin("driver"):

        def write(name: int) -> None:
            for at in range(100):
                LOG.info("%d %d %s", name, at, "x" * 500)

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    rows = lines_of(tmp_path / "driver.jsonl")[1:]
    for name in range(4):
        of_thread = [row["message"].split()[1] for row in rows if row["message"][0] == str(name)]
        assert of_thread == [str(at) for at in range(100)]


def test_what_cannot_be_written_is_said_once_and_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "driver.jsonl").mkdir()
    with bare_root(), Logs(folder=tmp_path).begin("driver"):
        LOG.info("one")
        LOG.info("%d", "no number")
    told = capsys.readouterr().err
    assert told.count("was not written") == 1
    assert "Is a directory" in told
    with Logs(folder=tmp_path / "of another machine").begin("trainer"):
        LOG.info("nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["driver.jsonl"]


@pytest.mark.slow
def test_a_full_disk_ends_nothing_and_later_lines_are_whole(tmp_path: Path):
    """A limit on the size of files takes the place of a disk that is full."""
    code = f"""
import logging, resource, signal
from pathlib import Path
from telescope_core.records.logs import Logs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
Logs(folder=Path({str(tmp_path)!r})).begin("driver")
for at in range(100):
    logging.info("line %d %s", at, "x" * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logging.info("there is room")
logging.info("again")
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "alive\n"
    assert done.stderr.count("was not written") == 1
    last = (tmp_path / "driver.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["message"] == "again"


@pytest.mark.parametrize(
    ("component", "source", "name"),
    [
        ("driver", "", "driver.jsonl"),
        ("trainer", "rank 12", "trainer-rank-12.jsonl"),
        ("server", "http://10.0.0.1:8000", "server-10-0-0-1-8000.jsonl"),
        ("environment", "lab/maze.2 0", "environment-lab-maze-2-0.jsonl"),
    ],
)
def test_names_of_logs_have_no_number_of_a_full_file(component: str, source: str, name: str):
    assert log_name(component, source) == name
    assert base_name(name) == (name, 0)
    assert base_name(name.replace(".jsonl", ".12.jsonl")) == (name, 12)
    assert base_name("inference-0.1.log") == ("inference-0.1.log", 0)
