"""What a server prints: in its log with time and level, and quoted when it dies."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from telescope_core.base import interrupts
from telescope_core.errors import ProcessDiedError
from telescope_core.records.logs import log_name
from telescope_core.records.output_logs import INFERENCE
from telescope_train.inference.server import ServerProcess, ServerSettings, running

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(ServerSettings):
    """The settings of a program that takes the place of vLLM's, which takes a minute to import."""

    text: str

    def arguments(self) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-c", self.text]


def script(folder: Path, text: str) -> Script:
    path = folder / log_name(INFERENCE, "3")
    return Script(model_path="none", port=free_port(), log_path=path, number=3, text=text)


@pytest.mark.slow
def test_a_server_that_dies_is_quoted_and_its_log_has_the_form_of_all_logs(tmp_path: Path):
    text = (
        "print('INFO loading')\nfor n in range(40): print('line', n)\nraise SystemExit('ERROR no')"
    )
    settings = script(tmp_path, text)
    for life in (1, 2):
        server = ServerProcess(settings)
        try:
            with pytest.raises(ProcessDiedError) as died:
                server.wait_until_healthy(DEADLINE_S)
        finally:
            server.close()
        message = str(died.value)
        assert f"died with exit code 1; its log is {settings.log_path}, which ends:\n" in message
        assert message.endswith("line 38\nline 39\nERROR no")
        assert "line 25\n" not in message
        rows = [json.loads(line) for line in settings.log_path.read_text().splitlines()]
        assert len(rows) == 42 * life
        assert [row["level"] for row in rows[-2:]] == ["info", "error"]
        assert {(row["component"], row["source"]) for row in rows} == {(INFERENCE, "3")}
        assert rows[-1]["life"] == life


def test_a_server_that_prints_is_known_to_do_something_and_one_that_is_killed_is_not_quoted(
    tmp_path: Path,
):
    text = "import time\nprint('50%', end='\\r', flush=True)\ntime.sleep(600)"
    server = ServerProcess(script(tmp_path, text))
    try:
        give_up_s = time.monotonic() + DEADLINE_S
        while not server.log_bytes():
            assert time.monotonic() < give_up_s
        server.check()
    finally:
        server.close()
    with pytest.raises(ProcessDiedError, match=r"of signal SIG(TERM|KILL); its log is \S+$"):
        server.check()


def test_a_server_that_crashes_is_quoted(tmp_path: Path):
    server = ServerProcess(script(tmp_path, "print('bad', flush=True)\nimport os\nos.abort()"))
    try:
        with pytest.raises(ProcessDiedError, match=r"of signal SIGABRT; its log is .* ends:\nbad$"):
            server.wait_until_healthy(DEADLINE_S)
    finally:
        server.close()


def test_temporary_files_of_a_server_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        text = (
            "import os, tempfile, time\ntempfile.mkstemp()\n"
            "os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
            "print('made', flush=True)\ntime.sleep(600)"
        )
        server = ServerProcess(script(tmp_path, text))
        try:
            give_up_s = time.monotonic() + DEADLINE_S
            while not server.log_bytes():
                assert time.monotonic() < give_up_s
        finally:
            server.close()
        kept = f"torchinductor_{os.getuid()}"
        assert os.listdir(place) == [kept], "what was compiled is for the next start, too"


def test_closing_again_ends_nobody_who_has_its_number_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = ServerProcess(script(tmp_path, "pass"))
    server.close()
    ended: list[int] = []
    monkeypatch.setattr("os.killpg", lambda group, number: ended.append(group))
    server.close()
    assert ended == []


def test_signals_leave_no_server_that_nobody_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One comes as soon as its process is there, and another one while that is ended."""
    started: list[subprocess.Popen[bytes]] = []

    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

        def wait(self, timeout: float | None = None) -> int:
            if interrupts.asked() and self is started[0]:
                os.kill(os.getpid(), signal.SIGINT)
            return super().wait(timeout)

    def serve() -> None:
        with interrupts.taken(), running(script(tmp_path, "import time; time.sleep(600)")):
            raise AssertionError("it never becomes healthy")

    monkeypatch.setattr("telescope_train.inference.server.subprocess.Popen", Signalled)
    try:
        with pytest.raises(interrupts.Interrupted):
            serve()
        assert started[0].poll() is not None
    finally:
        monkeypatch.undo()
        started[0].kill()
        started[0].wait()
