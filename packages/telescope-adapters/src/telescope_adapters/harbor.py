"""Harbor's task folders as environments: `harbor:FOLDER`.

A harness plays the instruction in the sandbox of the task; then its tests are copied there and run,
and the reward is the number that they write. `harbor_tasks` reads the folders, and `harbor_images`
says what their sandboxes are made of.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from telescope_adapters.harbor_images import AGENT_PYTHON, LocalImage, build_of, local_image, packed
from telescope_adapters.harbor_tasks import (
    HarborTask,
    read_tasks,
    require_none,
    resolved,
    unset_variables,
)
from telescope_adapters.settings import AdaptedConfig, AdaptedEnvironment
from telescope_core.base.errors import ConfigError
from telescope_core.base.protocols import PlayRequest
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import Example, Message, Rollout, Sampling, Split, StopReason
from telescope_core.environments import Episode, reward, setup
from telescope_core.examples import ListSource, split_of
from telescope_core.harnesses import AgentConfig, AgentEnvironment, AgentPlace, CommandHarness
from telescope_core.playing.rollout import play_rollout
from telescope_core.sandboxes.docker import DockerProvider
from telescope_core.sandboxes.errors import (
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxUnavailableError,
)
from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.lookup import open_provider, require_provider
from telescope_core.sandboxes.protocol import (
    CommandResult,
    Network,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    StopCause,
)

_ROOTS = ("/app", "/logs", "/root", "/solution", "/tests", "/workspace")
"""Folders that tasks expect to exist."""
_AGENT_S = 600.0
_MARGIN_S = 900.0
"""Seconds of a sandbox's life for activities without a time limit of their own."""
_FILES_S = 120.0
_LIFE_S = 30 * 24 * 3600.0
_MEMORY_MB = 2048
_PROCESSES = 512
_SAID = 4000
_NEW_FOLDERS = "mkdir -p /logs/agent /logs/artifacts /logs/verifier && chmod 777 /logs/*"
_EMPTIED = (
    'for folder in /tests /logs/verifier; do [ ! -h "$folder" ] || rm -f "$folder"; '
    'mkdir -p "$folder" && find "$folder" -mindepth 1 -delete || exit 1; done'
)
"""Command that removes a reward or a helper left by the image or the agent."""


class HarborConfig(AdaptedConfig, AgentConfig):
    """Settings of Harbor's task folders."""

    harness: str = "mini-swe-agent"
    """Name of the agent program."""
    agent_timeout_s: float = Field(default=_AGENT_S, gt=0)
    """Seconds after which the program is ended; where it is set it counts for every task, and else
    only for those that name none."""
    sandbox: str = "docker"
    """Provider of the sandboxes: `docker` (also podman), `local`, or one of a cloud."""
    docker_url: str = ""
    """Address of Docker or podman, such as unix:///run/podman/podman.sock; empty = the usual."""
    tasks: Literal["eval", "train", "divided"] = "eval"
    """`eval`: every task is held out. `train`: every task is trained on. `divided`: a hash of its
    name holds out a tenth of them."""
    leave_out: tuple[str, ...] = ()
    """Names of tasks that are not played."""
    cpus: float | None = None
    """Processors of each sandbox in place of those that tasks name."""
    memory_mb: int | None = None
    """Memory of each sandbox in place of what tasks name, MiB."""
    local_venv: str = ""
    """Virtual environment of this machine whose programs, such as pytest, come first in local
    sandboxes."""
    local_skips: tuple[str, ...] = ()
    """Texts: lines of RUN that have one of them are left out in local sandboxes, because this
    machine has what they install."""


class HarborEnvironment(AdaptedEnvironment, AgentEnvironment):
    """Task folders of Harbor."""

    Config = HarborConfig
    sandbox_spec = SandboxSpec(time_to_live_s=_LIFE_S, network=Network.ENDPOINT)
    agent_python = AGENT_PYTHON
    runs_agent = True
    """Whether a harness plays, for which images need its packages."""

    def __init__(self, config: HarborConfig | None = None) -> None:
        settings = cast(HarborConfig, config or self.Config())
        if settings.options:
            raise ConfigError(
                "env.options are for frameworks that make environments; tasks of Harbor have none"
            )
        require_provider(settings.sandbox)
        self._is_local = settings.sandbox == "local"
        tasks = read_tasks(Path(settings.id), settings.leave_out)
        self._images: dict[str, LocalImage] = {}
        self.tasks = {task.name: task for task in tasks}
        require_none([why for task in tasks for why in self._lacks(task, settings)])
        self._building: dict[str, asyncio.Lock] = {}
        super().__init__(settings)
        if not self._is_local and not self._harness.requirements:
            self._python = "python3"
        self._require_room()

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have tasks."""
        return tuple(split for split in Split if self._names(split))

    def examples(self, split: Split) -> ListSource:
        """Return the tasks, with their instructions as prompts."""
        tasks = self.tasks
        return ListSource(
            [Example(id=name, prompt=tasks[name].instruction) for name in self._names(split)]
        )

    async def first_messages(self, example: Example) -> list[Message]:
        """Return the instruction."""
        return self.opening(example.prompt)

    def provider(self) -> SandboxProvider | None:
        """Return the provider of containers; None = this machine."""
        if self._is_local:
            return None
        if self.config.sandbox == "docker":
            return DockerProvider(base_url=self.config.docker_url or None, as_image=True)
        return open_provider(self.config.sandbox)

    def local_provider(self, read_only: tuple[str, ...]) -> SandboxProvider:
        """Return a provider of local sandboxes with the folders in which tasks work."""
        roots = {*_ROOTS, *(root for image in self._images.values() for root in image.roots)}
        venv = self.config.local_venv
        return LocalProvider(
            read_only=(*read_only, *([venv] if venv else [])), writable=tuple(sorted(roots))
        )

    def place(self, episode: Episode[Any]) -> AgentPlace:
        """Return the place that the task asks for."""
        task = self.tasks[episode.example.id]
        return AgentPlace(
            spec=self._spec(task, image=episode.state.get("image")),
            folder=episode.state.get("folder"),
            environment=self._variables(task),
            timeout_s=self._agent_s(task),
            opens_endpoint=self.config.sandbox in ("local", "docker"),
        )

    @setup
    async def prepare(self, episode: Episode[Any]) -> None:
        """Create the sandbox of the task, and wait until it is ready."""
        task, state = self.tasks[episode.example.id], episode.state
        episode.tags["task_digest"] = task.digest
        if not self._is_local:
            state["image"] = await self._image(task)
        box = await self.sandbox(episode)
        _require(await box.run(["sh", "-c", _NEW_FOLDERS]), task, "/logs cannot be made")
        state["folder"] = task.table.environment.workdir
        if self._is_local:
            image = self._images[task.name]
            state["folder"] = image.folder
            for step in image.steps:
                if step.files:
                    await _unpack(box, task, step.files, "/")
                if step.command:
                    done = await box.run(
                        ["sh", "-c", step.command],
                        environment=self._with_venv(step.environment),
                        folder=step.folder,
                        timeout_s=task.table.environment.build_timeout_sec,
                    )
                    _require(done, task, f"`{step.command:.80}` of its Dockerfile failed")
        elif not state["folder"]:
            # Process 1 stands where the image says.
            state["folder"] = (await box.run(["readlink", "/proc/1/cwd"])).text.strip() or "/"
        await self._wait_until_healthy(task, box, state["folder"])

    async def score(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> Rollout:
        """Run the tests of the task in its sandbox, and use the reward that they write."""
        if "folder" not in episode.state:
            raise ConfigError(
                f"{example.id}: a task of Harbor is graded in the sandbox of its rollout, which is "
                "gone; play it again"
            )
        written = await self._verified(episode)
        episode.state["reward"] = written.pop("reward")
        done = await super().score(rollout, example, episode)
        took = {"verifier_s": episode.state["verifier_s"]}
        return replace(done, metrics={**done.metrics, **took, **written})

    @reward
    def verifier(self, episode: Episode[Any]) -> float:
        """The reward that the tests of the task wrote."""
        return episode.state["reward"]

    def _names(self, split: Split) -> list[str]:
        chosen = self.config.tasks
        if chosen == "divided":
            return [name for name in self.tasks if split_of(name) is split]
        return list(self.tasks) if split.value == chosen else []

    def _lacks(self, task: HarborTask, settings: HarborConfig) -> list[str]:
        """Return what this machine, or the chosen sandbox, lacks for a task."""
        table = task.table.environment
        values = {**table.env, **task.table.verifier.env}
        found = [
            f"{task.name} needs the variable {name}, which is not set or not granted; set it, and "
            f"link with --secret {name}"
            for name in dict.fromkeys(unset_variables(values))
        ]
        if self._is_local:
            try:
                self._images[task.name] = local_image(task, settings.local_skips)
            except ConfigError as error:
                found.append(str(error))
        elif not table.docker_image and not task.dockerfile:
            found.append(
                f"{task.name} has no environment/Dockerfile and names no environment.docker_image"
            )
        elif settings.sandbox != "docker" and not table.docker_image:
            found.append(
                f"{task.name} has an image that must be built; sandbox {settings.sandbox!r} takes "
                "only those that are"
            )
        elif settings.sandbox != "docker" and not table.workdir:
            found.append(
                f"{task.name} needs environment.workdir with sandboxes of {settings.sandbox!r}"
            )
        return found

    def _agent_s(self, task: HarborTask) -> float:
        settings = cast(HarborConfig, self.config)
        named_s = task.table.agent.timeout_sec
        is_set = "agent_timeout_s" in settings.model_fields_set
        return settings.agent_timeout_s if is_set or named_s is None else named_s

    def _spec(self, task: HarborTask, image: str | None = None) -> SandboxSpec:
        """Return the requirements on the task's sandbox; its image is known once it was built."""
        settings, table = cast(HarborConfig, self.config), task.table.environment
        memory_mb = settings.memory_mb or table.memory_mb or _MEMORY_MB
        disk_mb = None if settings.sandbox == "docker" else table.storage_mb
        if self._is_local:
            # Its files are in memory, and count as memory.
            disk_mb = min(disk_mb or memory_mb, memory_mb)
        has_network = table.network_mode == "public" and not self._is_local
        return SandboxSpec(
            image=image,
            cpus=settings.cpus or table.cpus,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            max_processes=_PROCESSES,
            time_to_live_s=self._agent_s(task) + task.table.verifier.timeout_sec + _MARGIN_S,
            network=Network.FULL if has_network else Network.ENDPOINT,
        )

    def _require_room(self) -> None:
        """Raise EnvironmentLoadError that names tasks for which this machine is too small."""
        if not isinstance(self._provider, LocalProvider | DockerProvider):
            return
        problems: list[str] = []
        try:
            self._provider.require(self._spec(task) for task in self.tasks.values())
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(
                f"{error}. Its address is the setting docker_url; or set sandbox to local"
            ) from None
        except SandboxLimitError:
            for task in self.tasks.values():
                try:
                    self._provider.require([self._spec(task)])
                except SandboxLimitError as error:
                    problems.append(f"{task.name}: {error}")
        require_none(problems)

    async def _image(self, task: HarborTask) -> str:
        """Return the name of the task's image; builds or pulls it if needed."""
        named = task.table.environment.docker_image
        if not isinstance(self._provider, DockerProvider):
            return str(named)
        requirements = self._harness.requirements if self.runs_agent else ()
        context, tag = await asyncio.to_thread(build_of, task, requirements)
        async with self._building.setdefault(tag, asyncio.Lock()):
            await self._provider.build(context, tag, task.table.environment.build_timeout_sec)
        return tag

    def _variables(self, task: HarborTask) -> dict[str, str]:
        own = resolved(task.table.environment.env)
        if not self._is_local:
            return own
        return self._with_venv({**self._images[task.name].environment, **own})

    def _with_venv(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` with the programs of the chosen virtual environment first."""
        venv = self.config.local_venv
        if not venv:
            return dict(variables)
        path = variables.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
        return {**variables, "PATH": f"{venv}/bin:{path}", "VIRTUAL_ENV": venv}

    async def _run(
        self, episode: Episode[Any], argv: list[str], variables: Mapping[str, str], limit_s: float
    ) -> CommandResult:
        """Run a script of the task in its folder, with its variables."""
        task, box = self.tasks[episode.example.id], await self.sandbox(episode)
        home = {} if self._is_local else {"HOME": "/root"}
        return await box.run(
            argv,
            environment={**home, **self._variables(task), **resolved(variables)},
            folder=episode.state["folder"],
            timeout_s=limit_s,
        )

    async def _wait_until_healthy(self, task: HarborTask, box: Sandbox, folder: str) -> None:
        check = task.table.environment.healthcheck
        if check is None:
            return
        began_s, num_failed = time.monotonic(), 0
        while True:
            done = await box.run(
                ["sh", "-c", check.command],
                environment=self._variables(task),
                folder=folder,
                timeout_s=check.timeout_sec,
            )
            if done.succeeded:
                return
            is_starting = time.monotonic() - began_s < check.start_period_sec
            num_failed += not is_starting
            if num_failed >= check.retries:
                _require(done, task, f"its health check failed {num_failed} times")
            await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)

    async def _verified(self, episode: Episode[Any]) -> dict[str, float]:
        """Return the verifier's numbers: `reward`, and others by name.

        Raises SandboxError if it wrote none, which is not the agent's fault.
        """
        task, box = self.tasks[episode.example.id], await self.sandbox(episode)
        _require(
            await box.run(["sh", "-c", _EMPTIED]),
            task,
            "/tests and /logs/verifier cannot be emptied",
        )
        await _unpack(box, task, await asyncio.to_thread(packed, task.folder / "tests"), "/tests")
        limit_s = task.table.verifier.timeout_sec
        done = await self._run(
            episode, ["bash", "/tests/test.sh"], task.table.verifier.env, limit_s
        )
        said = f"{done.error_text}\n{done.text}".strip()[-_SAID:]
        episode.state["verifier_s"] = done.wall_s
        episode.note("verifier", said, kind="stdout")
        # One of its processes may have met the limit of the memory, and the script gone on.
        if done.stop in (StopCause.TIMEOUT, StopCause.SANDBOX_ENDED):
            raise SandboxError(
                f"{task.name}: its verifier did not end by itself ({done.stop}, limit {limit_s:g} "
                "s)"
            )
        return await _written(box, task, said)


async def _written(box: Sandbox, task: HarborTask, said: str) -> dict[str, float]:
    """Return the numbers in the reward files; JSON takes precedence over text."""
    numbers: dict[str, float] = {}
    found = [await _text(box, f"/logs/verifier/{name}") for name in ("reward.json", "reward.txt")]
    try:
        if found[0] is not None:
            values = json.loads(found[0])
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
            numbers = _numbers(cast(dict[str, object], values))
        if "reward" not in numbers and found[1] is not None:
            numbers["reward"] = float(found[1])
    except ValueError as error:
        raise SandboxError(
            f"{task.name}: the reward that its verifier wrote cannot be read: {error}"
        ) from None
    if not math.isfinite(numbers.get("reward", math.nan)):
        raise SandboxError(
            f"{task.name}: its verifier wrote no number as reward to /logs/verifier/reward.json "
            f"or reward.txt; it said last: {said[-300:]!r}"
        )
    return numbers


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return finite numbers; booleans are left out."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


async def _text(box: Sandbox, path: str) -> str | None:
    try:
        return (await box.read(path)).decode(errors="replace")
    except SandboxFileError:
        return None


async def _unpack(box: Sandbox, task: HarborTask, files: bytes, folder: str) -> None:
    done = await box.run(
        ["tar", "-xf", "-", "--no-same-owner", "-C", folder], stdin=files, timeout_s=_FILES_S
    )
    _require(done, task, f"files cannot be copied to {folder}")


def _require(done: CommandResult, task: HarborTask, what: str) -> None:
    """Raise SandboxError unless a command succeeded that the agent cannot influence."""
    if not done.succeeded:
        said = f"{done.text}\n{done.error_text}".strip()[-300:]
        raise SandboxError(f"{task.name}: {what} ({done.stop}, exit {done.exit_code}): {said}")


class HarborOracle(HarborEnvironment):
    """Plays the solution of a task, or nothing at all, in place of an agent."""

    harness = CommandHarness(argv=("true",))
    runs_agent = False
    plays_solution = True

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Run the solution to its end, whatever its exit code."""
        task = self.tasks[episode.example.id]
        # What asks a policy nothing has no reward.
        await episode.generate()
        if not self.plays_solution:
            return StopReason.COMPLETED
        box = await self.sandbox(episode)
        _require(await box.run(["mkdir", "-p", "/solution"]), task, "/solution cannot be made")
        await _unpack(
            box, task, await asyncio.to_thread(packed, task.folder / "solution"), "/solution"
        )
        variables = {"DEBIAN_FRONTEND": "noninteractive", **task.table.solution.env}
        limit_s = self.place(episode).timeout_s
        done = await self._run(episode, ["bash", "/solution/solve.sh"], variables, limit_s)
        episode.note("solution", f"{done.text}\n{done.error_text}"[-_SAID:], kind="stdout")
        return StopReason.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """The rewards of a task for its own solution, and for doing nothing."""

    task: str
    solution: float | None
    """None = there is no solution, or it could not be graded."""
    nothing: float | None
    problems: tuple[str, ...]


async def check_tasks(
    settings: Mapping[str, Any], num_tasks: int, tell: Callable[[TaskCheck], None]
) -> list[TaskCheck]:
    """Play the solution, and nothing at all, for the first tasks; calls `tell` after each.

    The solution must earn the maximum and nothing must not.
    """
    given: dict[str, Any] = {**settings, "harness": "", "harness_options": {}, "tasks": "eval"}
    environment = cast(HarborOracle, HarborOracle.from_settings(given))
    checks: list[TaskCheck] = []
    try:
        for index, task in enumerate([*environment.tasks.values()][:num_tasks]):
            checks.append(await _checked(environment, task, index))
            tell(checks[-1])
    finally:
        await environment.close()
    return checks


async def _checked(environment: HarborOracle, task: HarborTask, index: int) -> TaskCheck:
    highest = environment.reward_max
    problems: list[str] = []
    earned: dict[bool, float | None] = {True: None, False: None}
    for plays_solution in (True, False):
        if plays_solution and not task.has_solution:
            problems.append("it brings no solution/solve.sh")
            continue
        environment.plays_solution = plays_solution
        request = PlayRequest(
            split=Split.EVAL,
            example_index=index,
            group_id="check",
            index=0,
            sampling=Sampling(max_tokens=1),
            deadline_s=_LIFE_S,
        )
        policy = ScriptedClient([""]).policy("")
        rollout = await play_rollout(environment, "harbor", request, policy)
        total = earned[plays_solution] = rollout.reward
        who = "its solution" if plays_solution else "nothing at all"
        if total is None:
            problems.append(f"{who}: {rollout.error}")
        elif (total >= highest) is not plays_solution:
            said = next((one.value for one in rollout.info if one.key == "verifier"), "")[-300:]
            problems.append(f"{who} earns {total:g} of {highest:g}; the tests said last: {said!r}")
    return TaskCheck(
        task=task.name,
        solution=earned[True],
        nothing=earned[False],
        problems=tuple(problems),
    )
