"""Harbor's task folders as data: `task.toml`, the instruction and the files beside it.

Requirements of a task that nothing here supports are refused by name when it is read, before a
rollout. `harbor` plays tasks, and `harbor_images` reads their Dockerfiles.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, unknown_name

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_SIZE = re.compile(r"([0-9.]+)\s*([KMG])I?B?", re.IGNORECASE)
_MB_OF = {"K": 1 / 1024, "M": 1, "G": 1024}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_CANARY = re.compile(r"(?:[ \t]*(?:#.*canary.*|<!--.*canary.*-->)[ \t]*\n)+\s*", re.IGNORECASE)
"""Comments at the beginning of an instruction that mark it for leak detection."""
_SHOWN = 6
_ROOT = (None, "root", "0", 0)


class _Table(BaseModel):
    """A table of `task.toml`; unknown keys do not affect how a task is played."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HealthCheck(_Table):
    """A command that succeeds once the sandbox is ready."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class _Phase(_Table):
    user: str | int | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class _Environment(_Table):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    env: dict[str, str] = {}
    skills_dir: str | None = None
    mcp_servers: list[Any] = []
    healthcheck: HealthCheck | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_keys(cls, given: Any) -> Any:
        """Accept `memory`, `storage` and `allow_internet`, the names in older files."""
        if not isinstance(given, dict):
            return cast(object, given)
        table = dict(cast(dict[str, Any], given))
        for old in ("memory", "storage"):
            size = table.pop(old, None)
            if size is not None:
                found = _SIZE.fullmatch(str(size).strip())
                if found is None:
                    raise ValueError(f"{old} must be a size such as '2G' or '512M', got {size!r}")
                table.setdefault(f"{old}_mb", int(float(found[1]) * _MB_OF[found[2].upper()]))
        if table.pop("allow_internet", None) is False:
            table.setdefault("network_mode", "no-network")
        return table


class _Solution(_Table):
    env: dict[str, str] = {}


class _Package(_Table):
    name: str = ""


class _File(_Table):
    task: _Package = _Package()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task folder."""

    name: str
    """`org/name` in the file, else the name of the folder."""
    folder: Path
    table: _File
    instruction: str

    @property
    def has_solution(self) -> bool:
        """Whether it has a solution that can be run."""
        return (self.folder / "solution" / "solve.sh").is_file()

    @property
    def dockerfile(self) -> str:
        """The text of its Dockerfile; empty where it names an image, or has none."""
        path = self.folder / "environment" / "Dockerfile"
        if self.table.environment.docker_image or not path.is_file():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names, modes and contents of all its files."""
        whole = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not {".git", "__pycache__"} & set(path.parts):
                name = path.relative_to(self.folder).as_posix()
                is_program = os.access(path, os.X_OK)
                whole.update(f"{name}\0{is_program:d}\0".encode())
                whole.update(hashlib.sha256(path.read_bytes()).digest())
        return whole.hexdigest()


def read_tasks(folder: Path, leave_out: Sequence[str] = ()) -> list[HarborTask]:
    """Return the task in `folder`, or those in the folders in it, by name.

    Raises ConfigError where there is none, and EnvironmentLoadError naming all that cannot be read
    or played.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"harbor:{folder}: there is no such folder; give a task folder, or one of task folders"
        )
    is_one = (folder / "task.toml").is_file()
    folders = [folder] if is_one else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not folders:
        raise ConfigError(
            f"harbor:{folder} has no task.toml, and no folder in it has one; expected a task "
            "folder of Harbor, or a folder of them"
        )
    tasks: dict[str, HarborTask] = {}
    problems: list[str] = []
    for one in folders:
        try:
            task = _read(one)
        except ConfigError as error:
            if one.name not in leave_out:
                problems.append(str(error))
            continue
        if task.name in tasks:
            problems.append(
                f"{one.name}: its name {task.name!r} is that of {tasks[task.name].folder.name} too"
            )
        tasks[task.name] = task
    known = {*tasks, *(one.name for one in folders)}
    for name in leave_out:
        if name not in known:
            raise unknown_name("task", name, known, "(env.leave_out)")
    kept = [
        task
        for name, task in tasks.items()
        if name not in leave_out and task.folder.name not in leave_out
    ]
    problems += [f"{task.name} {why}" for task in kept for why in _unplayed(task)]
    require_none(problems)
    if not kept:
        raise ConfigError(f"harbor:{folder}: env.leave_out leaves out every task")
    return kept


def require_none(problems: Sequence[str]) -> None:
    """Raise EnvironmentLoadError with `problems`, each of which begins with a task."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise EnvironmentLoadError(
            f"{'; '.join(problems[:_SHOWN])}{more}. Leave out such tasks with the setting "
            "leave_out, a list of names"
        )


def _read(folder: Path) -> HarborTask:
    try:
        text = (folder / "task.toml").read_text(encoding="utf-8")
        table = _File.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder.name}: task.toml cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{folder.name}: task.toml: {where}: {first['msg']}, got {first['input']!r:.80}"
        ) from None
    path = folder / "instruction.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    marked = _CANARY.match(text)
    return HarborTask(
        name=table.task.name or folder.resolve().name,
        folder=folder.resolve(),
        table=table,
        instruction=text[marked.end() :] if marked else text,
    )


def _unplayed(task: HarborTask) -> list[str]:
    """Return the needs of the task that no sandbox here supports."""
    table, files = task.table, task.folder
    environment, verifier = table.environment, table.verifier
    separate = verifier.environment_mode == "separate" or verifier.environment is not None
    compose = [name for name in _COMPOSE if (files / "environment" / name).exists()]
    phases = {"agent": table.agent, "verifier": verifier}
    is_listed = environment.network_mode == "allowlist"
    asked = {
        "has no instruction.md": not task.instruction and not table.steps,
        "has no tests/test.sh": not (files / "tests" / "test.sh").is_file() and not table.steps,
        "has several steps ([[steps]])": table.steps,
        "brings a conversation to go on with (trajectory.json)": (
            files / "trajectory.json"
        ).exists(),
        f"needs os = {environment.os!r}": environment.os.lower() != "linux",
        "needs GPUs (environment.gpus)": environment.gpus,
        "needs a TPU (environment.tpu)": environment.tpu,
        "needs MCP servers (environment.mcp_servers)": environment.mcp_servers,
        "needs skills (environment.skills_dir)": environment.skills_dir,
        "is graded in a sandbox of its own (verifier.environment_mode)": separate,
        "collects what services hold (verifier.collect)": verifier.collect,
        f"needs several containers ({', '.join(compose)})": compose,
        "opens some addresses alone (environment.network_mode)": is_listed,
        **{
            f"has a user of its own for the {name} ({name}.user = {phase.user!r})": phase.user
            not in _ROOT
            for name, phase in phases.items()
        },
        **{
            f"has another network for the {name} ({name}.network_mode)": phase.network_mode
            not in (None, environment.network_mode)
            for name, phase in phases.items()
        },
    }
    return [why for why, is_asked in asked.items() if is_asked]


def unset_variables(values: Mapping[str, str]) -> list[str]:
    """Return the variables of this process that `values` need and that are not set."""
    found = [match for value in values.values() if (match := _VARIABLE.fullmatch(value))]
    return [match[1] for match in found if match[2] is None and match[1] not in os.environ]


def resolved(values: Mapping[str, str]) -> dict[str, str]:
    """Return `values` with `${NAME}` and `${NAME:-default}` replaced, when a command starts.

    They are replaced late so that no record contains them. Raises ConfigError for an unset one.
    """
    if unset := unset_variables(values):
        raise ConfigError(
            f"the environment variable {unset[0]} is not set, which a task hands to its sandbox"
        )
    return {
        name: os.environ.get(match[1], match[2] or "")
        if (match := _VARIABLE.fullmatch(value))
        else value
        for name, value in values.items()
    }
