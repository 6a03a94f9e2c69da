"""What is left of a probe when it has ended: no process, however it was started; and what it sees.

Each environment here starts a program while it is imported and notes the program's process id.
"""

import os
import signal
import sys
from contextlib import suppress

import psutil
import pytest

from telescope_envs.processes import running as subprocesses
from telescope_envs.validation import Level
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.levels import (
    Trial,
    check_load,
)
from telescope_envs.validation.processes import (
    ProbePlace,
    Task,
    make_job,
    run_together,
)

pytestmark = pytest.mark.slow

MODULE = '''"""Sums."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Sums(SingleTurnEnvironment):
    """Adds."""

    def examples(self, split):
        return ListSource([Example(id=split, prompt=f"1 + 1 = ? ({split})", answer="2")])

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.answer)


def note(what):
    with (Path(os.environ["XDG_CACHE_HOME"]) / "notes").open("a") as notes:
        notes.write(f"{what}\\n")


SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
'''
STARTS = {
    "a child": "note(subprocess.Popen(SLEEPS).pid)",
    "a session of its own": "note(subprocess.Popen(SLEEPS, start_new_session=True).pid)",
    "a daemon": """
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid:
        note(pid)
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.execv(sys.executable, SLEEPS)
os.wait()
""",
}
SECRETS = {
    **{"TELESCOPE_HUB_TOKEN": "seen-1", "TELESCOPE_WORKER_TOKEN": "seen-2", "HF_TOKEN": "seen-3"},
    **{"GITHUB_TOKEN": "seen-4", "AWS_SECRET_ACCESS_KEY": "seen-5", "OPENAI_API_KEY": "seen-6"},
    **{"UV_INDEX_CORP_PASSWORD": "seen-7", "https_proxy": "http://me:seen-8@127.0.0.1:9"},
    **{"SSH_AUTH_SOCK": "/seen-9", "PYTHONPATH": "/seen-10", "LD_PRELOAD": ""},
}


@pytest.fixture
def trial(tmp_path):
    """Return a function that adds code to the module and says where it can be imported."""

    def write(code: str) -> Trial:
        (tmp_path / "scratch").mkdir()
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "starting_sums.py").write_text(f"{MODULE}\n{code}\n")
        place = ProbePlace(
            interpreter=sys.executable,
            search_path=(str(tmp_path / "modules"),),
            scratch=tmp_path / "scratch",
        )
        return Trial(place=place, factory="starting_sums:Sums", num_examples=1)

    return write


def notes(trial: Trial) -> list[str]:
    path = trial.place.scratch / "home" / ".cache" / "notes"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def started(tmp_path):
    """Return the ids that were noted; afterwards end what a failed test has left."""
    path = tmp_path / "scratch" / "home" / ".cache" / "notes"

    def read() -> list[int]:
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    yield read
    for pid in read():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_it_started_is_gone_when_the_check_is_done(trial, started, start):
    findings = Findings()
    check_load(trial(start), findings)
    assert not findings.has_failed(Level.LOAD)
    assert len(started()) == 2, "both processes of the check import it"
    assert [pid for pid in started() if psutil.pid_exists(pid)] == []


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), 9)", "os.killpg(0, 9)"])
def test_or_when_the_probe_dies(trial, started, end):
    findings = Findings()
    check_load(trial(f"{STARTS['a daemon']}\n{end}\n"), findings)
    (found,) = [one for one in findings.results("") if one.id == "load.import"]
    assert "its process ended with" in found.evidence[0].text
    assert len(started()) == 2
    assert [pid for pid in started() if psutil.pid_exists(pid)] == []


def test_or_when_its_time_is_over(trial, started):
    hanging = trial(f"{STARTS['a daemon']}\ntime.sleep(600)\n")
    job = make_job(hanging.place, "load", hanging.factory, 1, cuts_network=True)
    limit_s = 0.5
    while not started():  # until the limit was long enough for it to begin
        (told,) = run_together(hanging.place, [Task(job=job, limit_s=limit_s)])
        limit_s *= 2
        assert limit_s < 120
    assert told.end.startswith("not done after")
    assert told.stage == "load.import"
    assert [pid for pid in started() if psutil.pid_exists(pid)] == []


def test_a_supervisor_that_was_stopped_is_killed_and_its_probe_with_it(trial, started, monkeypatch):
    monkeypatch.setattr(subprocesses, "SUPERVISOR_S", 0.0)
    hanging = trial("note(os.getpid())\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)")
    job = make_job(hanging.place, "load", hanging.factory, 1, cuts_network=True)
    limit_s = 0.5
    while not started():
        run_together(hanging.place, [Task(job=job, limit_s=limit_s)])
        limit_s *= 2
        assert limit_s < 120
    probes = [psutil.Process(pid) for pid in started() if psutil.pid_exists(pid)]
    assert psutil.wait_procs(probes, timeout=60)[1] == []


def test_no_variable_of_this_process_is_seen(trial, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    tried = trial("for name, value in os.environ.items(): note(f'{name}={value}')")
    findings = Findings()
    check_load(tried, findings)
    assert not findings.has_failed(Level.LOAD)
    seen = {line.partition("=")[0] for line in notes(tried)}
    assert "PYTHONHASHSEED" in seen
    assert "seen-" not in "\n".join(notes(tried))
    assert seen <= {
        *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "HOME", "TMPDIR", "PYTHONHASHSEED"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "OMP_NUM_THREADS"),
    }
