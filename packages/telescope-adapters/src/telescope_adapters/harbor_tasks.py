"""Harbor's task folders as data: `task.toml`, the instruction and the files beside it.

Requirements of a task that nothing here supports are refused by name when it is read, before a
rollout. `harbor` plays tasks, and `harbor_images` reads their Dockerfiles.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from telescope_adapters.allowed_hosts import EVERYWHERE, normalize_hosts
from telescope_core.base.errors import ConfigError, EnvironmentLoadError, unknown_name

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_HEADER_VARIABLE = re.compile(r"\$\{[^}]+\}")
_SIZE = re.compile(r"([0-9.]+)\s*([KMG])I?B?", re.IGNORECASE)
_MB_OF = {"K": 1 / 1024, "M": 1, "G": 1024}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_CANARY = re.compile(r"(?:[ \t]*(?:#.*canary.*|<!--.*canary.*-->)[ \t]*\n)+\s*", re.IGNORECASE)
"""Comments at the beginning of an instruction that mark it for those who look for leaks."""
_SHOWN = 6
_VERIFIER_S = 600.0
_MAIN = "main"
"""The container in which the agent works; a task with others is refused."""
_PUBLISHED = "/logs/artifacts"
"""Files that an agent leaves there are always copied to a verifier in another sandbox."""
_ROOT = (None, "root", "0", 0)


class _Table(BaseModel):
    """A table of `task.toml`; keys that are not known say nothing of how a task is played."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HealthCheck(_Table):
    """A command that succeeds once the sandbox is ready."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class _Network(_Table):
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] = []

    @model_validator(mode="after")
    def _allows_hosts_in_its_mode(self) -> "_Network":
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts are for network_mode 'allowlist' alone")
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _names_hosts(cls, hosts: list[str]) -> list[str]:
        return [*normalize_hosts(hosts)]

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The hosts that can be reached; None = every one."""
        return None if self.network_mode in (None, "public") else tuple(self.allowed_hosts)


class _Phase(_Network):
    user: str | int | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)


class McpServer(_Table):
    """An MCP server that the agent uses from its sandbox."""

    name: str
    transport: Literal["stdio", "sse", "http", "streamable-http"] = "sse"
    url: str = ""
    command: str = ""
    args: list[str] = []
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _can_be_reached(self) -> "McpServer":
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"an MCP server with transport {self.transport!r} needs a {needed}")
        return self

    @property
    def variables(self) -> dict[str, str]:
        """The variables in its headers, as they stand there."""
        found = [_HEADER_VARIABLE.findall(value) for value in self.headers.values()]
        return {text: text for texts in found for text in texts}

    def entry(self) -> dict[str, object]:
        """Return the server as programs read it; raises ConfigError for a variable not set."""
        if self.transport == "stdio":
            return {"command": self.command, "args": self.args}
        values, headers = resolved(self.variables), dict(self.headers)
        for text, value in values.items():
            headers = {name: given.replace(text, value) for name, given in headers.items()}
        kind = "sse" if self.transport == "sse" else "http"
        return {"type": kind, "url": self.url, "headers": headers}


class _Environment(_Network):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = "public"
    env: dict[str, str] = {}
    skills_dir: str | None = None
    mcp_servers: list[McpServer] = []
    healthcheck: HealthCheck | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_keys(cls, given: Any) -> Any:
        """Take `memory`, `storage` and `allow_internet`, as older files say the same."""
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


class Artifact(_Table):
    """A file or folder of the agent's sandbox that a verifier elsewhere is given."""

    source: str
    """Its path there; a relative one is below the working directory."""
    exclude: tuple[str, ...] = ()
    """Patterns of names in it, as `tar --exclude` takes them."""
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _is_below_the_root(cls, source: str) -> str:
        if ".." in source.split("/") or not source.strip("/"):
            raise ValueError(f"source must be a path below / without '..', got {source!r}")
        return source


def _artifact(given: object) -> object:
    return {"source": given} if isinstance(given, str) else given


_Artifacts = list[Annotated[Artifact, BeforeValidator(_artifact)]]


class Collect(_Table):
    """A command in the agent's sandbox after the agent has ended; its exit code says nothing."""

    command: str
    service: str = _MAIN
    timeout_sec: float = Field(default=60.0, gt=0)
    user: str | int | None = None


class _Verifier(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Environment | None = None
    collect: list[Collect] = []

    @model_validator(mode="after")
    def _has_one_place(self) -> "_Verifier":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                "environment_mode is 'shared', which leaves no place for an environment of its own"
            )
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The kind of sandbox that it grades in; None = this table does not say."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class _StepTable(_Table):
    name: str
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: _Artifacts = []

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name.strip() in ("", ".", "..") or "/" in name:
            raise ValueError(f"name must be that of a folder in steps/, got {name!r}")
        return name


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
    steps: list[_StepTable] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: _Artifacts = []

    @field_validator("steps")
    @classmethod
    def _names_each_once(cls, steps: list[_StepTable]) -> list[_StepTable]:
        names = [step.name.casefold() for step in steps]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two steps have the name {twice[0]!r}")
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """The image of one sandbox of a task."""

    name: str
    """Name of the task; for a sandbox other than the agent's, also whose it is."""
    table: _Environment
    context: Path
    """The folder of its Dockerfile."""
    has_tests: bool = False
    """Whether the image brings `/tests`, so that none are copied there."""

    @property
    def dockerfile(self) -> str:
        """The text of its Dockerfile; empty where it names an image, or has none."""
        path = self.context / "Dockerfile"
        if self.table.docker_image or not path.is_file():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborStep:
    """One instruction of a task, and how what the agent did about it is graded."""

    name: str = ""
    """Empty for the only step of a task without `steps`."""
    instruction: str
    agent_s: float | None
    """The agent's time limit, seconds; None = the task names none."""
    verifier_s: float
    verifier_env: Mapping[str, str]
    agent_hosts: tuple[str, ...] | None
    """Hosts that the agent reaches besides its endpoint; None = every one."""
    verifier_hosts: tuple[str, ...] | None
    tests: tuple[Path, ...]
    """Folders that are copied to `/tests`, a later one over an earlier one."""
    solution: Path
    workdir: Path | None = None
    """Folder whose files are put into the working directory before the agent starts."""
    healthcheck: HealthCheck | None = None
    min_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Least numbers, by name, with which the next step is played."""
    artifacts: tuple[Artifact, ...] = ()
    collect: tuple[Collect, ...] = ()
    grader: TaskImage | None = None
    """The verifier's own sandbox; None = it grades in that of the agent."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task folder."""

    name: str
    """`org/name` as the file says, else the name of the folder."""
    folder: Path
    table: _File
    image: TaskImage
    """The agent's sandbox."""
    steps: tuple[HarborStep, ...]
    """At least one."""

    @property
    def images(self) -> tuple[TaskImage, ...]:
        """The agent's sandbox, and those of verifiers."""
        return (self.image, *(step.grader for step in self.steps if step.grader is not None))

    @property
    def missing_solution(self) -> str:
        """The first script of its solution that is not there; empty if it can be run."""
        scripts = [step.solution / "solve.sh" for step in self.steps]
        missing = [path for path in scripts if not path.is_file()]
        return missing[0].relative_to(self.folder).as_posix() if missing else ""

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
            f"harbor:{folder}: there is no such folder; give a task folder, one of task folders, "
            "or NAME@VERSION with the setting registry, a registry.json"
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
    """Raise EnvironmentLoadError that names `problems`, each of which begins with a task."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise EnvironmentLoadError(
            f"{'; '.join(problems[:_SHOWN])}{more}. Leave out such tasks with the setting "
            "leave_out, a list of names"
        )


def _read(folder: Path) -> HarborTask:
    try:
        text = (folder / "task.toml").read_text(encoding="utf-8-sig")
        table = _File.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder.name}: task.toml cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{folder.name}: task.toml: {where}: {first['msg']}, got {first['input']!r:.80}"
        ) from None
    whole = folder.resolve()
    name = table.task.name or whole.name
    environment = table.environment
    steps = [_step(whole, name, table, step) for step in table.steps or [None]]
    reached = {environment.hosts, *(step.agent_hosts for step in steps)}
    reached |= {step.verifier_hosts for step in steps if step.grader is None}
    if None in reached and len(reached) > 1:
        # A sandbox has one network all the time: its public parts reach every host by a proxy.
        if environment.hosts is None:
            everywhere = {"network_mode": "allowlist", "allowed_hosts": [*EVERYWHERE]}
            environment = environment.model_copy(update=everywhere)
        steps = [
            replace(
                step,
                agent_hosts=EVERYWHERE if step.agent_hosts is None else step.agent_hosts,
                verifier_hosts=EVERYWHERE
                if step.grader is None and step.verifier_hosts is None
                else step.verifier_hosts,
            )
            for step in steps
        ]
    return HarborTask(
        name=name,
        folder=whole,
        table=table,
        image=TaskImage(name=name, table=environment, context=whole / "environment"),
        steps=tuple(steps),
    )


def _step(folder: Path, task: str, table: _File, step: _StepTable | None) -> HarborStep:
    """Return one step of a task, or the only one of a task without steps."""
    verifier, grader = table.verifier, _grader(folder, task, table, step)
    levels = (table.environment,) if grader is None else (grader.table,)
    common = HarborStep(
        instruction=_instruction(folder),
        agent_s=table.agent.timeout_sec,
        verifier_s=verifier.timeout_sec or _VERIFIER_S,
        verifier_env=verifier.env,
        agent_hosts=_hosts(table.agent, table.environment),
        verifier_hosts=_hosts(verifier, *levels),
        tests=(folder / "tests",),
        solution=folder / "solution",
        artifacts=_merged(table.artifacts),
        collect=tuple(verifier.collect),
        grader=grader,
    )
    if step is None:
        return common
    own, least = folder / "steps" / step.name, step.min_reward
    return replace(
        common,
        name=step.name,
        instruction=_instruction(own),
        agent_s=step.agent.timeout_sec or common.agent_s,
        verifier_s=step.verifier.timeout_sec or common.verifier_s,
        verifier_env={**verifier.env, **step.verifier.env},
        agent_hosts=_hosts(step.agent, table.agent, table.environment),
        verifier_hosts=_hosts(step.verifier, verifier, *levels),
        tests=(folder / "tests", own / "tests"),
        solution=own / "solution" if (own / "solution").is_dir() else common.solution,
        workdir=own / "workdir",
        healthcheck=step.healthcheck,
        min_rewards={"reward": least} if isinstance(least, float) else least or {},
        artifacts=_merged([*table.artifacts, *step.artifacts]),
        collect=(*verifier.collect, *step.verifier.collect),
    )


def _hosts(*levels: _Network) -> tuple[str, ...] | None:
    """Return the hosts of the first level that has a mode of its own."""
    return next((one for one in levels if one.network_mode), levels[-1]).hosts


def _instruction(folder: Path) -> str:
    path = folder / "instruction.md"
    text = path.read_text(encoding="utf-8-sig") if path.is_file() else ""
    marked = _CANARY.match(text)
    return text[marked.end() :] if marked else text


def _merged(artifacts: Sequence[Artifact]) -> tuple[Artifact, ...]:
    """Return them with the folder in which an agent always may leave some."""
    is_named = any(one.source.rstrip("/") == _PUBLISHED for one in artifacts)
    return tuple(artifacts) if is_named else (Artifact(source=_PUBLISHED), *artifacts)


def _grader(folder: Path, task: str, table: _File, step: _StepTable | None) -> TaskImage | None:
    """Return the verifier's own sandbox; None if it grades in that of the agent.

    The image is the first that is named, or whose Dockerfile lies beside the tests: of the step,
    then of the task; else it is that of the agent, into which the tests are copied.
    """
    levels = [(step.verifier, folder / "steps" / step.name / "tests")] if step is not None else []
    levels.append((table.verifier, folder / "tests"))
    if next((one.mode for one, _ in levels if one.mode), "shared") == "shared":
        return None
    chosen = next((one.environment for one, _ in levels if one.environment), table.environment)
    network = next((one for one, _ in levels if one.network_mode), chosen)
    found: dict[str, Any] = {"docker_image": table.environment.docker_image}
    context, has_tests = folder / "environment", False
    for verifier, tests in levels:
        named = verifier.environment.docker_image if verifier.environment is not None else None
        if named or (tests / "Dockerfile").is_file() or (tests / _COMPOSE[0]).is_file():
            found, context, has_tests = {"docker_image": named}, tests, True
            break
    return TaskImage(
        name=f"{task} (verifier{f' of {step.name}' if step is not None else ''})",
        table=chosen.model_copy(
            update={
                **found,
                "network_mode": network.network_mode,
                "allowed_hosts": network.allowed_hosts,
            }
        ),
        context=context,
        has_tests=has_tests,
    )


def _unplayed(task: HarborTask) -> list[str]:
    """Return what the task needs and no sandbox here gives."""
    table, environment = task.table, task.image.table
    folders = [task.folder, *(task.folder / "steps" / step.name for step in table.steps)]
    agents = [table.agent, *(step.agent for step in table.steps)]
    verifiers = [table.verifier, *(step.verifier for step in table.steps)]
    hooks = [hook for verifier in verifiers for hook in verifier.collect]
    sources = [one for step in task.steps for one in step.artifacts]
    needs: list[tuple[str, object]] = [
        (
            "brings a conversation to go on with (trajectory.json)",
            any((folder / "trajectory.json").exists() for folder in folders),
        ),
        ("needs skills (environment.skills_dir)", environment.skills_dir),
        (
            "collects what other containers hold (verifier.collect, artifacts)",
            any(one.service not in (None, _MAIN) for one in (*hooks, *sources)),
        ),
    ]
    for name, phases in (("agent", agents), ("verifier", [*verifiers, *hooks])):
        for phase in phases:
            what = f"has a user of its own for the {name} ({name}.user = {phase.user!r})"
            needs.append((what, phase.user not in _ROOT))
    for step in task.steps:
        whose = f" for its step {step.name!r}" if step.name else ""
        found = any((folder / "test.sh").is_file() for folder in step.tests)
        needs += [
            (f"has no instruction.md{whose}", not step.instruction),
            (
                f"has no tests/test.sh{whose}",
                not found and not (step.grader is not None and step.grader.has_tests),
            ),
        ]
    for image in task.images:
        key, table = "environment" if image is task.image else "verifier.environment", image.table
        compose = [name for name in _COMPOSE if (image.context / name).exists()]
        needs += [
            (f"needs os = {table.os!r} ({key}.os)", table.os.lower() != "linux"),
            (f"needs GPUs ({key}.gpus)", table.gpus),
            (f"needs a TPU ({key}.tpu)", table.tpu),
            (f"needs several containers ({', '.join(compose)})", compose),
        ]
    return list(dict.fromkeys(why for why, is_needed in needs if is_needed))


def unset_variables(values: Mapping[str, str]) -> list[str]:
    """Return the variables of this process that `values` need and that are not set."""
    found = [match for value in values.values() if (match := _VARIABLE.fullmatch(value))]
    return [match[1] for match in found if match[2] is None and match[1] not in os.environ]


def resolved(values: Mapping[str, str]) -> dict[str, str]:
    """Return `values` with `${NAME}` and `${NAME:-default}` replaced by this process's variables.

    They are replaced as late as a command starts, so that no record contains them. Raises
    ConfigError for an unset one.
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
