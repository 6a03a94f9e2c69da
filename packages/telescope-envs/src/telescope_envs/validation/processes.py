"""Running probes in the environment's interpreter, with few variables and a time limit.

Probes have a home, a temporary folder and a working directory that are deleted afterwards.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from telescope_envs.subprocesses import end_group, passed_on
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.probes.job import Job, Kind

_PASSED_ON = ("OMP_NUM_THREADS",)
"""Variables that probes see besides those that every program of an environment sees."""
OWN_SHARE = 0.5
"""A probe that is not done in time, but computed for this part of it, is itself the cause."""
_KEEPER_S = 10.0
"""Seconds that the keeper of a probe has to end all that the probe started."""
_LOOK_EVERY_S = 0.01
_PROGRAM = """
import importlib, sys, types
envs, validation, guard, job, *first = sys.argv[1:]
for name, path in (("telescope_envs", envs), ("telescope_envs.validation", validation)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
probes = "telescope_envs.validation.probes"
keeper = importlib.import_module(f"{probes}.keeper").go_on_in_kept_child(int(guard))
sys.path[:0] = first
main = importlib.import_module(f"{probes}.main").main
for name in ("telescope_envs", "telescope_envs.validation"):
    del sys.modules[name]
main(job, keeper)
"""
"""Imports the probes without their parent packages, which that interpreter may not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an environment can be imported."""

    interpreter: str
    search_path: tuple[str, ...]
    scratch: Path
    """Deleted afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One probe to run."""

    job: Job
    hash_seed: int = 1
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables it gets besides the harmless ones: declared secrets."""
    limit_s: float


@dataclass(slots=True)
class Told:
    """What a probe reported."""

    lines: list[dict[str, Any]]
    data: dict[str, Any]
    end: str = ""
    """Why the probe did not finish; empty if it did."""
    is_own_end: bool = True
    """Whether the environment is the cause of `end`, as far as can be known."""
    stage: str = ""
    """The check that it started last."""

    def tell(self, findings: Findings) -> None:
        """Record in `findings` everything that was reported about checks."""
        for line in self.lines:
            match line["kind"]:
                case "passed":
                    findings.passed(line["check"])
                case "found":
                    findings.found(
                        line["check"],
                        line["text"],
                        example_id=line["example_id"],
                        completion=line["completion"],
                    )
                case "not applicable":
                    findings.not_applicable(line["check"], line["reason"])
                case "inconclusive":
                    findings.inconclusive(line["check"], line["reason"])
                case "not run":
                    findings.not_run([line["check"]], line["reason"])
                case "fact":
                    findings.facts[line["name"]] = line["value"]
                case _:
                    pass
        if self.end and self.stage:
            record = findings.found if self.is_own_end else findings.cut_short
            record(self.stage, self.end)


def make_job(
    place: Place, kind: Kind, factory: str, num_examples: int, *, cuts_network: bool
) -> Job:
    """Return a job that writes its answers to the place's scratch folder."""
    _, output = tempfile.mkstemp(suffix=".jsonl", dir=place.scratch)
    return Job(
        kind=kind,
        factory=factory,
        output=output,
        num_examples=num_examples,
        writable=[*(str(path) for path in _caches(place).values()), output],
        cuts_network=cuts_network,
    )


def run_together(place: Place, errands: Sequence[Errand]) -> list[Told]:
    """Run probes at the same time; returns what each reported. None of them outlives this call."""
    with ExitStack() as stack:
        running = [stack.enter_context(_started(place, errand)) for errand in errands]
        return [one.told() for one in running]


def _caches(place: Place) -> dict[str, Path]:
    """Return the folders that an environment may write to, by the variables that name them."""
    home = os.environ.get("HOME", "")
    hub = os.environ.get("HF_HOME") or (str(Path(home) / ".cache" / "huggingface") if home else "")
    caches = {
        "TMPDIR": place.scratch / "tmp",
        "XDG_CACHE_HOME": place.scratch / "home" / ".cache",
        "XDG_CONFIG_HOME": place.scratch / "home" / ".config",
    }
    return {**caches, "HF_HOME": Path(hub)} if hub else caches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A running probe."""

    errand: Errand
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    """The output of the probe and of the environment."""
    deadline_s: float
    guard: "_Guard"

    def told(self) -> Told:
        """Wait until it ends or its time is up; returns what it reported."""
        try:
            code = self.process.wait(max(0.0, self.deadline_s - time.monotonic()))
            end = Ending(f"its process ended with {code}" if code else "")
        except subprocess.TimeoutExpired:
            end = late_ending(self.errand.limit_s, _ended(self.process, self.guard))
        self.said.seek(0)
        text = self.said.read()[-4000:].decode("utf-8", "replace").strip()
        last = (text.splitlines() or [""])[-1]
        text = f"{end.text}: {last}" if end.text and last else end.text
        return read_answers(Path(self.errand.job.output), text, is_own_end=end.is_own)


class Ending(NamedTuple):
    """How a probe ended; the text is empty if it did what it was to do."""

    text: str
    is_own: bool = True
    """Whether the environment is the cause, as far as can be known."""


def late_ending(limit_s: float, spent_s: float) -> Ending:
    """Return how a probe ended that was not done in time, of which it computed for `spent_s`."""
    text = f"not done after {limit_s:g} s, {spent_s:.1f} s of which it computed"
    if spent_s >= OWN_SHARE * limit_s:
        return Ending(text)
    return Ending(f"{text}: it waited for something, or the machine was busy", is_own=False)


class _Guard:
    """Our end of a pipe whose other end the keeper of a probe watches."""

    def __init__(self) -> None:
        self.watched_fd, self._own_fd = os.pipe()

    def watched(self) -> None:
        """Leave the other end to the keeper alone."""
        os.close(self.watched_fd)

    def close(self) -> None:
        """Tell the keeper to end everything; to say it twice changes nothing."""
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1


def _ended(process: subprocess.Popen[bytes], guard: _Guard) -> float:
    """End a probe and all it started; returns the seconds of processor time that they spent.

    The keeper does it. One that cannot is killed itself.
    """
    guard.close()
    give_up_s = time.monotonic() + _KEEPER_S
    while True:
        is_late = time.monotonic() > give_up_s
        if is_late:
            end_group(process)
        pid, status, spent = os.wait4(process.pid, 0 if is_late else os.WNOHANG)
        if pid:
            break
        time.sleep(_LOOK_EVERY_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    return spent.ru_utime + spent.ru_stime


@contextmanager
def _started(place: Place, errand: Errand) -> Generator[_Running]:
    """Start a probe; on exit, kill it and the processes that it started."""
    caches = _caches(place)
    home, work = place.scratch / "home", place.scratch / "work"
    for folder in (home, work, *(path for path in caches.values() if _is_in(place, path))):
        folder.mkdir(parents=True, exist_ok=True)
    environ = {
        **passed_on(),
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        **{name: str(path) for name, path in caches.items()},
        **errand.environ,
        "HOME": str(home),
        "PYTHONHASHSEED": str(errand.hash_seed),
    }
    here = Path(__file__).parent
    command = [place.interpreter, "-P", "-c", _PROGRAM, str(here.parent), str(here)]
    with tempfile.TemporaryFile(dir=place.scratch) as said, closing(_Guard()) as guard:
        command += [str(guard.watched_fd), errand.job.text(), *place.search_path]
        try:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(guard.watched_fd,),
                start_new_session=True,
            )
        finally:
            guard.watched()
        deadline_s = time.monotonic() + errand.limit_s
        try:
            yield _Running(
                errand=errand, process=process, said=said, deadline_s=deadline_s, guard=guard
            )
        finally:
            if process.poll() is None:
                _ended(process, guard)


def _is_in(place: Place, path: Path) -> bool:
    return place.scratch in path.parents


def read_answers(path: Path, end: str = "", *, is_own_end: bool = True) -> Told:
    """Return what a probe wrote; `end` is the reason to give if it did not finish."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # the line that it was writing when it died
            break
    has_ended = any(line["kind"] == "end" for line in lines)
    stages = [line["check"] for line in lines if line["kind"] == "stage"]
    return Told(
        lines=lines,
        data={line["name"]: line["value"] for line in lines if line["kind"] == "data"},
        end="" if has_ended else end or "its process ended early",
        is_own_end=is_own_end,
        stage=stages[-1] if stages else "",
    )
