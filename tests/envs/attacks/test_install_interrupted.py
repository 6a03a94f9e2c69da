"""Installing under kill -9, two at once, a full disk, and registries that go back in time."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_cli.env import install as installing
from telescope_cli.env.install import Outcome, attempt_all
from telescope_core.base.interrupts import Interrupted, asked, taken
from telescope_core.errors import RegistryError
from telescope_envs.install.data import (
    lock_file,
    remove_leftovers,
)
from telescope_envs.install.install import install
from telescope_envs.install.steps import (
    InstallOptions,
    Step,
)
from telescope_envs.processes.running import passed_on, run_program
from telescope_envs.records.files import locked
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.lockfile import read_lock

pytestmark = pytest.mark.slow
PROGRAM = """
import os, signal, sys
from pathlib import Path
from telescope_envs.install.install import install
from telescope_envs.install.steps import InstallOptions
from telescope_envs.registry import Registry

def announce(step):
    print(step, flush=True)
    if sys.argv[2] and step.endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

options = InstallOptions(lock=Path("telescope.lock").absolute())
done = install(Registry.at(Path(sys.argv[1])), "acme/toy", options=options, progress=announce)
print("done", done.is_new, done.release.version)
"""


@pytest.fixture
def toy_registry(registry):
    registry.store.publish(toy_publication())
    return registry


def started(registry, *, killed_at: str = "", prefix: tuple[str, ...] = ()) -> subprocess.Popen:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM, registry.address, killed_at],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def toys() -> list[str]:
    return [one.version for one in installed_environments() if one.id == "acme/toy"]


def test_kill_minus_nine_at_every_step(toy_registry, home):
    for step in Step:
        code, out, err = ended(started(toy_registry, killed_at=step))
        assert code == -9, f"{step}: {out}{err}"
        is_active = step is Step.WRITE_LOCK
        assert toys() == (["0.1.0"] if is_active else []), f"half-made after {step}"
        assert not Path("telescope.lock").exists()
    code, out, err = ended(started(toy_registry))
    assert code == 0, err
    assert out.splitlines()[-1] == "done False 0.1.0", "what was built before the kill is used"
    assert read_lock(Path("telescope.lock")).find("acme/toy") is not None
    assert [path.name[:6] for path in (home / "venvs").iterdir()] == ["acme--"]
    assert [path.name[:1] for path in (home / "cache" / "wheels").iterdir()] != ["."]


def test_two_installers_at_once_both_end_well(toy_registry, home):
    first, second = started(toy_registry), started(toy_registry)
    ends = [ended(first), ended(second)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    built = [out for _, out, _ in ends if Step.BUILD in out]
    assert len(built) == 1, "one builds, the other uses what it finds"
    assert toys() == ["0.1.0"]
    assert len(list((home / "venvs").iterdir())) == 1


def test_leftovers_go_only_when_their_owner_is_gone(home):
    folder = home / "venvs" / ".building-acme--toy"
    folder.mkdir(parents=True)
    with locked(lock_file("acme/toy"), what="a test"):
        assert remove_leftovers() == []
        assert folder.is_dir()
    assert remove_leftovers() == [folder]
    assert not folder.exists()


LIMITS_BYTES = (256, 8192, 200_000)


@pytest.mark.parametrize("limit_bytes", LIMITS_BYTES)
def test_a_full_disk(toy_registry, home, limit_bytes):
    limited = "import os, resource, sys; r = resource; n = int(sys.argv[1]); "
    limited += "r.setrlimit(r.RLIMIT_FSIZE, (n, n)); os.execvp(sys.argv[2], sys.argv[2:])"
    prefix = (sys.executable, "-c", limited, str(limit_bytes))
    code, _, err = ended(started(toy_registry, prefix=prefix))
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert "telescope_core.base.errors." in err, f"said in words, not as a defect: {last}"
    assert toys() == []
    assert not Path("telescope.lock").exists()
    left = [path for path in home.rglob(".*") if path.name.startswith((".part", ".building"))]
    assert left == []
    if limit_bytes == max(LIMITS_BYTES):  # what was written before is there, too
        assert ended(started(toy_registry))[0] == 0


@pytest.mark.parametrize(
    ("step", "is_done"),
    [
        *((step, False) for step in (Step.LOCK, Step.BUILD, Step.DEPENDENCIES, Step.PROBE)),
        (Step.ACTIVATE, True),
        (Step.WRITE_LOCK, True),
    ],
)
def test_a_signal_ends_an_installation_at_its_next_step(toy_registry, home, step, is_done):
    lock = Path("telescope.lock").absolute()
    steps, begun = [], []

    def announce(text):
        steps.append(text)
        if text.endswith(step):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            while asked() is None:
                os.sched_yield()

    def toy():
        install(toy_registry, "toy", options=InstallOptions(lock=lock), progress=announce)
        return Outcome(name="toy", state="installed")

    def other():
        begun.append("other")
        return Outcome(name="other", state="installed")

    with taken(), pytest.raises(Interrupted):
        attempt_all({"toy": toy, "other": other}, at_once=1)
    assert begun == []
    assert steps[-1].endswith(Step.WRITE_LOCK if is_done else step)
    assert toys() == (["0.1.0"] if is_done else [])
    assert lock.exists() == is_done
    assert [path for path in home.rglob(".*") if path.name.startswith((".part", ".building"))] == []


def test_a_signal_ends_a_program_that_hangs_and_one_thread_that_does_is_left(monkeypatch):
    monkeypatch.setattr(installing, "_END_WITHIN_S", 0.0)
    silence, ended_by = threading.Event(), []

    def hang(number):
        if number == 0:
            silence.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        try:
            run_program(["sleep", "900"], environ=passed_on(), limit_s=900.0, late="late")
        except BaseException as error:
            ended_by.append(type(error))
            ends.set()
            raise

    ends = threading.Event()
    with taken():
        with pytest.raises(Interrupted):
            attempt_all({str(one): partial(hang, one) for one in range(2)}, at_once=2)
        assert ends.wait(60)
    assert ended_by == [Interrupted]


def test_an_older_version_must_be_typed_exactly(toy_registry, home, tmp_path):
    options = InstallOptions(lock=tmp_path / "telescope.lock")
    toy_registry.store.publish(toy_publication("0.2.0"))
    install(toy_registry, "toy", options=options)
    index = Path(toy_registry.address) / "index" / "acme" / "toy.jsonl"
    lines = index.read_text().splitlines()
    index.write_text(f"{lines[0]}\n")
    for text in ("toy", "toy@<1"):
        with pytest.raises(RegistryError, match=r"0\.2\.0 is installed, but .* offers 0\.1\.0"):
            install(toy_registry, text, options=options)
    assert toys() == ["0.2.0"]
    install(toy_registry, "toy@0.1.0", options=options)
    assert toys() == ["0.1.0"]
    assert len(list((home / "venvs").iterdir())) == 1, "nothing uses the other any more"


def test_yanked_is_no_reason_to_go_back(toy_registry, home, tmp_path):
    options = InstallOptions(lock=tmp_path / "telescope.lock")
    toy_registry.store.publish(toy_publication("0.2.0"))
    install(toy_registry, "toy", options=options)
    toy_registry.store.change_status(
        "acme/toy", lambda status: status.changed(yanked={"0.2.0": "pays for junk"})
    )
    with pytest.raises(RegistryError, match=r"0\.2\.0 is yanked: pays for junk.*type it exactly"):
        install(toy_registry, "toy", options=options)
    assert toys() == ["0.2.0"]


def test_a_release_whose_bytes_were_replaced(toy_registry, home, tmp_path):
    options = InstallOptions(lock=tmp_path / "telescope.lock")
    install(toy_registry, "toy", options=options)
    before = options.lock.read_bytes()
    root = Path(toy_registry.address)
    other = toy_publication(code="evil = 1\n")
    release = other.release
    (root / release.wheel.urls[0]).write_bytes(other.wheel)
    (root / "index/acme/toy.jsonl").write_text(f"{release.as_json().decode()}\n")
    with pytest.raises(RegistryError, match=r"is locked with wheel sha256 .* never replaced"):
        install(toy_registry, "toy", options=options)
    assert options.lock.read_bytes() == before


def test_another_project_keeps_its_virtual_environment(toy_registry, home, tmp_path):
    first, second = tmp_path / "a" / "telescope.lock", tmp_path / "b" / "telescope.lock"
    for path in (first, second):
        path.parent.mkdir()
    install(toy_registry, "toy", options=InstallOptions(lock=first))
    toy_registry.store.publish(toy_publication("0.2.0"))
    install(toy_registry, "toy", options=InstallOptions(lock=second))
    assert len(list((home / "venvs").iterdir())) == 2
    os.remove(first)
    install(toy_registry, "toy", options=InstallOptions(lock=second))
    assert len(list((home / "venvs").iterdir())) == 1
