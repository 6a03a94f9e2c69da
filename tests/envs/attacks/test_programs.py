"""What a program that is started on an environment's behalf may have, and what is left of it."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.processes import Program

from telescope_core.errors import (
    ConfigError,
    EnvironmentLoadError,
    NoRoomError,
    TelescopeError,
)
from telescope_envs.install.packages import install_requirements
from telescope_envs.processes import running as subprocesses
from telescope_envs.processes import uv
from telescope_envs.processes.running import (
    kept,
    run_program,
    wait_for,
)
from telescope_envs.processes.uv import Uv, index_settings

DEADLINE_S = 60.0


def run(code: str, *, limit_s: float = DEADLINE_S, **options: object) -> str:
    command = [sys.executable, "-I", "-c", code]
    found = run_program(command, environ={}, limit_s=limit_s, late="too late", **options)  # type: ignore[arg-type]
    assert found.returncode == 0, found.stderr
    return found.stdout


def is_running(pid: int) -> bool:
    with suppress(OSError):
        # A process that was killed stays listed until its parent, which is not this one, asks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def until_gone(pid: int) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < give_up_s, f"process {pid} is still there"
        time.sleep(0.01)


CHILD = "import os, sys, time\npid = os.fork()\nif pid == 0:\n    time.sleep(600)\nprint(pid)\n"


def test_what_it_started_ends_with_it() -> None:
    # The child holds both outputs open, which must not be waited for.
    until_gone(int(run(CHILD)))


DAEMON = """
import os, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(write, str(os.getpid()).encode())
    time.sleep(600)
os.wait()
pid = os.read(read, 99).decode()
"""


def test_a_daemon_with_a_session_of_its_own_is_gone_with_it() -> None:
    pid = int(run(f"{DAEMON}print(pid)"))
    assert not is_running(pid), "it is ended before the call returns"


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), 9)", "os.killpg(0, 9)"])
def test_or_when_the_program_dies(tmp_path: Path, end: str) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-c", f"{DAEMON}open({str(note)!r}, 'w').write(pid)\n{end}"]
    # The file is written when it is closed, which is before the end.
    found = run_program(command, environ={}, limit_s=DEADLINE_S, late="too late")
    assert found.returncode == (7 if "exit" in end else -signal.SIGKILL)
    assert not is_running(int(note.read_text()))


@pytest.mark.slow
def test_a_program_that_stops_its_supervisor_is_killed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "SUPERVISOR_S", 0.0)
    note, limit_s = tmp_path / "pid", 0.5
    code = (
        f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid(), 19)\ntime.sleep(600)"
    )
    while not (note.exists() and note.read_text()):
        with pytest.raises(EnvironmentLoadError, match="too late"):
            run(code, limit_s=limit_s)
        limit_s *= 2
        assert limit_s < DEADLINE_S
    until_gone(int(note.read_text()))


def test_nothing_is_left_when_telescope_itself_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    part = note.with_suffix(".part")
    code = (
        f"{DAEMON}open({str(part)!r}, 'w').write(pid + ' ' + str(os.getpid()))\n"
        f"os.rename({str(part)!r}, {str(note)!r})\ntime.sleep(600)"
    )
    outer = (
        "import sys\nfrom telescope_envs.processes.running import run_program\n"
        f"run_program([sys.executable, '-c', {code!r}], environ={{}}, limit_s=600, late='')"
    )
    # What is killed cannot delete its temporary folder.
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    with Program([sys.executable, "-c", outer], env=place) as telescope:
        give_up_s = time.monotonic() + DEADLINE_S
        while not note.exists():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        telescope.kill()
    for pid in note.read_text().split():
        until_gone(int(pid))


def test_a_program_that_is_not_there_is_an_error_of_its_own() -> None:
    for command in ("/no/such/program", "no-such-program"):
        with pytest.raises(FileNotFoundError) as missing:
            run_program([command], environ={}, limit_s=DEADLINE_S, late="too late")
        assert missing.value.filename == command


def test_programs_at_the_same_time_may_write_more_than_a_pipe_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdout.write('x' * 1_000_000 + 'end')"]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(kept(command, environ={}, folder=tmp_path, limit_s=DEADLINE_S))
            for _ in range(3)
        ]
        wait_for(programs)
        assert [(one.out[-3:], one.is_late) for one in programs] == [("end", False)] * 3


@pytest.mark.slow
def test_what_it_started_ends_when_its_time_is_over(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import os, time\npid = os.fork()\nif pid:\n"
        f"    open({str(note)!r} + '.part', 'w').write(str(pid))\n"
        f"    os.rename({str(note)!r} + '.part', {str(note)!r})\ntime.sleep(600)"
    )
    limit_s = 0.2
    while True:  # until the limit was long enough for it to begin
        with pytest.raises(EnvironmentLoadError, match="too late"):
            run(code, limit_s=limit_s)
        if note.exists():
            break
        limit_s *= 2
        assert limit_s < DEADLINE_S
    until_gone(int(note.read_text()))


def test_an_output_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "MAX_OUTPUT_BYTES", 1000)
    text = run("import sys\nfor i in range(200_000): sys.stdout.write(f'{i}\\n')")
    assert len(text) == 1000
    assert text.endswith("199998\n199999\n")
    # Both outputs are read, however much goes to either.
    assert run("import sys\nsys.stderr.write('x' * 1_000_000)\nprint('end')") == "end\n"


def test_output_that_is_not_text_is_no_error() -> None:
    written = run("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe ok')")
    assert written.endswith(" ok")


def test_it_works_in_an_empty_folder_with_nothing_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TELESCOPE_HUB_TOKEN", "secret")
    (tmp_path / "uv.toml").write_text("")
    with (tmp_path / "lock").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        code = (
            "import os\n"
            "names = sorted(os.environ.keys() - {'LC_CTYPE'})\n"
            "open_ones = []\n"
            "for number in range(3, 64):\n"
            "    try: open_ones.append(os.readlink(f'/proc/self/fd/{number}'))\n"
            "    except OSError: pass\n"
            "print(os.listdir('.'), names, [one for one in open_ones if 'lock' in one])"
        )
        assert run(code) == "[] ['HOME', 'TMPDIR'] []\n"
        assert run("import os; print(os.environ['HOME'] == os.getcwd() == os.environ['TMPDIR'])")
        held_by_trusted = run(
            f"import os; os.fstat({held.fileno()}); print('yes')", heirs=(held.fileno(),)
        )
        assert held_by_trusted == "yes\n"


def test_the_configuration_of_the_folder_around_does_not_reach_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uv.toml", "pyproject.toml"):
        (tmp_path / name).write_text("[tool.uv]\nthis is no setting")
    monkeypatch.chdir(tmp_path)
    listed = Uv().run(["pip", "list", "--python", sys.executable], failure="cannot list")
    assert "telescope-core" in listed


def test_the_users_own_configuration_of_uv_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "config" / "uv" / "uv.toml"
    chosen.parent.mkdir(parents=True)
    chosen.write_text("this is no setting")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("UV_CONFIG_FILE", raising=False)
    with pytest.raises(EnvironmentLoadError, match=r"uv\.toml"):
        Uv().run(["pip", "list", "--python", sys.executable], failure="cannot list")


def test_uv_sees_no_token_of_another_program() -> None:
    given = {
        **{"TELESCOPE_HUB_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "HF_TOKEN": "h"},
        **{"UV_PUBLISH_TOKEN": "p", "PIP_TOKEN": "p", "GITHUB_TOKEN": "g"},
        **{"UV_INDEX_CORP_PASSWORD": "w", "https_proxy": "x", "HOME": "/nowhere"},
        "PIP_CONFIG_FILE": os.devnull,
    }
    kept = {"UV_INDEX_CORP_PASSWORD": "w", "https_proxy": "x", "HOME": "/nowhere"}
    assert index_settings(given) == kept
    assert index_settings(given, has_index=False) == {"https_proxy": "x", "HOME": "/nowhere"}


@pytest.mark.slow
def test_a_shared_install_builds_nothing_from_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    source = tmp_path / "telescope_test_only_source-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(started)!r}, 'w').close()")
    (source / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: telescope-test-only-source\nVersion: 1.0\n"
    )
    with tarfile.open(tmp_path / "telescope_test_only_source-1.0.tar.gz", "w:gz") as packed:
        packed.add(source, source.name)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    with pytest.raises(EnvironmentLoadError, match="telescope-test-only-source"):
        install_requirements(["telescope-test-only-source"], needed_by="acme/toy")
    assert not started.exists()


@pytest.mark.slow
def test_a_program_that_closes_its_outputs_is_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "done"
    run(
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(0.3)\n"
        f"open({str(note)!r}, 'w').close()"
    )
    assert note.exists()


def test_a_program_killed_by_a_signal_says_so() -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    found = run_program(command, environ={}, limit_s=DEADLINE_S, late="too late")
    assert found.returncode == -signal.SIGKILL


FINDING = """
import sys
from concurrent.futures import ThreadPoolExecutor
import telescope_envs.processes.uv
import uv

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(16) as pool:
    print(len(set(pool.map(lambda _: uv.find_uv_bin(), range(64)))))
"""


@pytest.mark.slow
def test_uv_is_found_by_threads_that_are_the_first_to_look_for_it() -> None:
    for _ in range(3):
        assert run(FINDING) == "1\n"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "error: failed to copy file from `/a` to `PLACE/b`: No space left on device "
            "(os error 28)",
            NoRoomError,
            r"cannot write .*/b: the disk is full \(.* are free in ",
        ),
        ("error: write failed: Quota exceeded (os error 122)", NoRoomError, "quota of this user"),
        (
            "error: Failed to initialize cache at `/proc/x/.cache/uv`\n  cause: failed to create "
            "directory `/proc/x/.cache/uv`: No such file or directory (os error 2)",
            ConfigError,
            r"uv cannot use its cache \(.*\); set HOME or UV_CACHE_DIR",
        ),
        ("error: no such package", EnvironmentLoadError, "uv said:\nerror: no such package"),
    ],
)
def test_a_failure_of_uv_has_the_code_of_its_cause(tmp_path, monkeypatch, said, kind, words):
    said = said.replace("PLACE", str(tmp_path))
    done = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(uv, "run_program", lambda *_, **__: done)
    with pytest.raises(TelescopeError, match=f"(?s)acme/toy.*{words}") as failed:
        uv.Uv().run(["venv"], failure="acme/toy needs a thing")
    assert type(failed.value) is kind
