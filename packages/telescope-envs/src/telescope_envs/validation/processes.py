"""Run probes in the environment's interpreter, with few variables and a time limit.

Probes have a home, a temporary folder and a working directory that are deleted afterwards.
"""

import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from packaging.metadata import parse_email

from telescope_core.base.errors import EnvironmentLoadError, TelescopeError
from telescope_core.probes.answers import Job, Kind
from telescope_envs.install.data import python_of
from telescope_envs.install.packages import missing_requirements
from telescope_envs.install.requirements import CORE, direct_needs
from telescope_envs.install.venv import copy_byte_code, copy_distribution, site_packages
from telescope_envs.processes.running import Kept, kept, passed_on, wait_for
from telescope_envs.processes.uv import Uv, installed_pins, lacks_wheel, wheels_only
from telescope_envs.records.files import read_file
from telescope_envs.validation.findings import Findings

_PASSED_ON = ("OMP_NUM_THREADS",)
"""Variables for probes, besides those for every program of an environment."""
OWN_SHARE = 0.5
"""Share of its time for which a late probe must have computed to be itself the cause."""
_PROGRAM = """
import sys
from telescope_core.probes.main import main
sys.path[:0] = sys.argv[2:]
main(sys.argv[1])
"""
"""Runs the probes of the telescope-core that the environment's interpreter has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlace:
    """A place from which an environment can be imported."""

    interpreter: str
    search_path: tuple[str, ...]
    scratch: Path
    """Temporary folder, deleted afterwards."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables for every probe, besides harmless ones: the address of fixture rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One probe to run."""

    job: Job
    hash_seed: int = 1
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables besides the harmless ones: declared secrets."""
    limit_s: float


@dataclass(slots=True)
class ProbeReply:
    """The report of a probe."""

    lines: list[dict[str, Any]]
    data: dict[str, Any]
    end: str = ""
    """Reason why the probe did not finish; empty if it did."""
    is_own_end: bool = True
    """Whether the environment is the cause of `end`, as far as is known."""
    stage: str = ""
    """The check that was started last."""

    def tell(self, findings: Findings) -> None:
        """Record in `findings` everything that was reported about checks."""
        for line in self.lines:
            match line["kind"]:
                case "passed":
                    findings.passed(line["check"])
                case "found":
                    said = {field: line[field] for field in ("example_id", "completion")}
                    findings.found(line["check"], line["text"], **said)
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
    place: ProbePlace, kind: Kind, factory: str, num_examples: int, *, cuts_network: bool
) -> Job:
    """Return a job that writes its answers to the place's scratch folder."""
    descriptor, output = tempfile.mkstemp(suffix=".jsonl", dir=place.scratch)
    os.close(descriptor)
    return Job(
        kind=kind,
        factory=factory,
        output=output,
        num_examples=num_examples,
        writable=[*(str(path) for path in _caches(place).values()), output],
        cuts_network=cuts_network,
    )


def run_together(place: ProbePlace, tasks: Sequence[Task]) -> list[ProbeReply]:
    """Run probes at once; returns the report of each. None of them outlives this call."""
    with ExitStack() as stack:
        probes = [stack.enter_context(_started(place, task)) for task in tasks]
        wait_for(probes)
        return [_reply(task, probe) for task, probe in zip(tasks, probes, strict=True)]


def _caches(place: ProbePlace) -> dict[str, Path]:
    """Return the folders to which an environment may write, by the variables that name them."""
    home = os.environ.get("HOME", "")
    hub = place.environ.get("HF_HOME") or os.environ.get("HF_HOME")
    hub = hub or (str(Path(home) / ".cache" / "huggingface") if home else "")
    caches = {
        "TMPDIR": place.scratch / "tmp",
        "XDG_CACHE_HOME": place.scratch / "home" / ".cache",
        "XDG_CONFIG_HOME": place.scratch / "home" / ".config",
    }
    return {**caches, "HF_HOME": Path(hub)} if hub else caches


def _reply(task: Task, probe: Kept) -> ProbeReply:
    """Return the report of a probe that has ended, or whose time was over."""
    code = probe.process.returncode
    end = Ending(f"its process ended with {code}" if code else "")
    if probe.is_late:
        end = late_ending(task.limit_s, probe.spent_s)
    last = (probe.err.strip().splitlines() or probe.out.strip().splitlines() or [""])[-1]
    text = f"{end.text}: {last}" if end.text and last else end.text
    return read_answers(Path(task.job.output), text, is_own_end=end.is_own)


class Ending(NamedTuple):
    """The end of a probe; the text is empty if it finished its job."""

    text: str
    is_own: bool = True
    """Whether the environment is the cause, as far as is known."""


def late_ending(limit_s: float, spent_s: float) -> Ending:
    """Return the end of a late probe, which computed for `spent_s`."""
    text = f"not done after {limit_s:g} s, {spent_s:.1f} s of which it computed"
    if spent_s >= OWN_SHARE * limit_s:
        return Ending(text)
    return Ending(f"{text}: it waited for something, or the machine was busy", is_own=False)


@contextmanager
def _started(place: ProbePlace, task: Task) -> Generator[Kept]:
    """Start a probe; on exit, nothing of it is left."""
    caches = _caches(place)
    home, work = place.scratch / "home", place.scratch / "work"
    own_caches = [path for path in caches.values() if place.scratch in path.parents]
    for folder in (home, work, *own_caches):
        folder.mkdir(parents=True, exist_ok=True)
    environ = {
        **passed_on(),
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        **place.environ,
        **{name: str(path) for name, path in caches.items()},
        **task.environ,
        "HOME": str(home),
        "PYTHONHASHSEED": str(task.hash_seed),
    }
    command = [place.interpreter, "-P", "-c", _PROGRAM, task.job.text(), *place.search_path]
    with kept(command, environ=environ, folder=work, limit_s=task.limit_s) as probe:
        yield probe


def read_answers(path: Path, end: str = "", *, is_own_end: bool = True) -> ProbeReply:
    """Return the answers of a probe; `end` is the reason if it did not finish."""
    lines: list[dict[str, Any]] = []
    try:
        told = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        told, end = "", f"what it reported cannot be read: {error}"
    for text in told.splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # the line that it was writing when it died
            break
    has_ended = any(line["kind"] == "end" for line in lines)
    stages = [line["check"] for line in lines if line["kind"] == "stage"]
    return ProbeReply(
        lines=lines,
        data={line["name"]: line["value"] for line in lines if line["kind"] == "data"},
        end="" if has_ended else end or "its process ended early",
        is_own_end=is_own_end,
        stage=stages[-1] if stages else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of the checks. Fields that do not apply are empty."""

    label: str
    """Its name in messages and reports."""
    project: Path | None = None
    """Folder with pyproject.toml."""
    wheel_name: str = ""
    wheel: bytes = b""
    metadata: bytes = b""
    """The METADATA file."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    """Path in the wheel -> content, of a wheel without forbidden content."""
    factory: str = ""
    """`module:Class`."""
    interpreter: str = sys.executable
    """The Python that imports it. It has the dependencies of a wheel, unless it is this one."""
    search_path: tuple[str, ...] = ()
    """Folders that go to the front of the interpreter's import path."""
    secrets: tuple[str, ...] | None = None
    """Secrets with which its release was published; None = not recorded."""


_CHECK = "load.requirements"


def prepare_place(
    subject: Subject, scratch: Path, findings: Findings, *, allow_sdist: Sequence[str] = ()
) -> ProbePlace | None:
    """Make `subject` importable; None if its dependencies cannot be installed.

    A wheel is unpacked, not installed. The subject's interpreter imports it, or, if that is this
    one and lacks a dependency, that of a virtual environment in `scratch`, which gets them.
    """
    findings.passed(_CHECK)
    if not subject.wheel:
        return ProbePlace(interpreter=subject.interpreter, search_path=(), scratch=scratch)
    unpacked = scratch / "unpacked"
    with zipfile.ZipFile(BytesIO(subject.wheel)) as archive:
        archive.extractall(unpacked)
    interpreter = subject.interpreter
    if interpreter == sys.executable:
        needs = parse_email(subject.metadata)[0].get("requires_dist", [])
        try:
            interpreter = interpreter_with(
                needs, scratch / "venv", needed_by=subject.label, allow_sdist=allow_sdist
            )
        except TelescopeError as error:
            findings.found(_CHECK, str(error))
            return None
    return ProbePlace(interpreter=interpreter, search_path=(str(unpacked),), scratch=scratch)


def interpreter_with(
    requires_dist: Sequence[str], folder: Path, *, needed_by: str, allow_sdist: Sequence[str] = ()
) -> str:
    """Return an interpreter that has `requires_dist` and the installed telescope-core.

    It is this one, if it lacks nothing, or that of a new virtual environment in `folder`. Raises
    EnvironmentLoadError if they cannot be installed there.
    """
    if not missing_requirements(requires_dist):
        return sys.executable
    needs = direct_needs(requires_dist)
    uv = Uv()
    uv.make_venv(folder)
    python = python_of(folder)
    wanted, pins = folder / "wanted.in", folder / "installed.txt"
    wanted.write_text("".join(f"{text}\n" for text in needs))
    pins.write_text("".join(f"{pin}\n" for pin in installed_pins()))
    target = ("--python", str(python), "--quiet")
    add = ["pip", "install", *target, "--requirements", str(wanted)]
    choose = ["pip", "compile", str(wanted), "--output-file", str(pins), *target]
    failure = f"the dependencies of {needed_by} cannot be installed"

    def run(built: Sequence[str]) -> None:
        constrained = [*add, "--constraints", str(pins), *wheels_only(built)]
        try:
            uv.run_cache_first(constrained, failure=failure)
        except EnvironmentLoadError:
            # As when it is locked: versions of this Python are preferred, not required. uv prefers
            # those in the file that it is to write.
            uv.run([*choose, *wheels_only(built)], failure=failure)
            uv.run_cache_first(constrained, failure=failure)

    try:
        uv.run_building(run, allow_sdist, python=str(python))
    except EnvironmentLoadError as error:
        raise lacks_wheel(str(error), needed_by) or error from None
    copy_distribution(distribution(CORE), site_packages(folder))
    copy_byte_code(site_packages(folder))
    return str(python)
