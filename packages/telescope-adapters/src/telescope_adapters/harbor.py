"""Harbor's task folders as environments: `harbor:FOLDER`.

A harness plays each instruction of a task in its sandbox; then the tests are run, and the reward is
made of the numbers that they write. `harbor_tasks` reads the folders, `harbor_images` says what
sandboxes are made of, and `harbor_grading` runs the tests.
"""

import asyncio
import math
import os
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from telescope_adapters.allowed_hosts import EVERYWHERE, AllowedHosts, proxy_for, proxy_variables
from telescope_adapters.harbor_grading import (
    Graded,
    SpoiledError,
    TaskSandbox,
    carried,
    combined,
    graded,
    hand_over,
    ungraded,
)
from telescope_adapters.harbor_images import (
    AGENT_PYTHON,
    LocalImage,
    build_of,
    local_image,
    packed,
    root_of,
    user_of,
)
from telescope_adapters.harbor_registry import dataset_folder
from telescope_adapters.harbor_tasks import (
    HarborStep,
    HarborTask,
    HealthCheck,
    TaskImage,
    read_tasks,
    require_none,
    resolved,
    unset_variables,
)
from telescope_adapters.settings import AdaptedConfig, AdaptedEnvironment
from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.protocols import PlayRequest
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import Example, Message, Rollout, Sampling, Split, StopReason
from telescope_core.environments import Episode, reward, setup
from telescope_core.examples import ListSource, split_of
from telescope_core.harnesses import AgentConfig, AgentEnvironment, AgentPlace, CommandHarness
from telescope_core.playing.rollout import play_rollout
from telescope_core.sandboxes.docker import DockerProvider
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.lookup import open_provider, require_provider
from telescope_core.sandboxes.protocol import (
    Network,
    Sandbox,
    SandboxLimitError,
    SandboxProvider,
    SandboxSpec,
    SandboxUnavailableError,
)

_ROOTS = ("/app", "/logs", "/root", "/solution", "/tests", "/workspace")
"""Folders that tasks take for granted."""
_AGENT_S = 600.0
_MARGIN_S = 900.0
"""Seconds of a sandbox's life for work that has no time limit of its own."""
_LIFE_S = 30 * 24 * 3600.0
_MEMORY_MB = 2048
_PROCESSES = 512
_SETUP_S = 600.0
_SAID = 4000
_HOME = r'sed -n "s/^[^:]*:[^:]*:$(id -u):[^:]*:[^:]*:\([^:]*\):.*/\1/p" /etc/passwd'
_NEW_FOLDERS = (
    "mkdir -p /logs/agent /logs/artifacts /logs/verifier /tests && chmod 777 /logs/* && "
    "find /logs/verifier -mindepth 1 -delete && { [ -w /tests ] || chmod u+rwx /tests; }"
)
"""The verifier's folder is emptied before there is an agent, so that a later failure is its doing.

So is one to write into /tests, which an image may hold for another user.
"""


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
    registry: str = ""
    """A `registry.json`, as a file or an address, in which `id` is a dataset NAME@VERSION; empty =
    `id` is a folder."""
    leave_out: tuple[str, ...] = ()
    """Names of tasks that are not played."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors of each sandbox in place of those that tasks name."""
    memory_mb: int | None = Field(default=None, gt=0)
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
    allowed_hosts = AllowedHosts
    """The rule by which hosts of `network_mode = "allowlist"` are reached."""
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
        registry = settings.registry
        folder = dataset_folder(registry, settings.id) if registry else Path(settings.id)
        tasks = read_tasks(folder, settings.leave_out)
        self._images: dict[str, LocalImage] = {}
        self._roots: set[str] = set()
        self.tasks = {task.name: task for task in tasks}
        require_none([why for task in tasks for why in self._lacks(task, settings)])
        self._building: dict[str, asyncio.Lock] = {}
        super().__init__(settings)
        if self.runs_agent and not getattr(self._harness, "takes_mcp_servers", False):
            require_none(
                [
                    f"{task.name} has MCP servers (environment.mcp_servers), which harness "
                    f"{self._harness.name!r} cannot be given; choose harness 'command', with "
                    "{mcp_config} in its argv"
                    for task in tasks
                    if task.image.table.mcp_servers
                ]
            )
        if not self._is_local and not self._harness.requirements:
            self._python = "python3"
        self._require_room()

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have tasks."""
        return tuple(split for split in Split if self._names(split))

    def examples(self, split: Split) -> ListSource:
        """Return the tasks, whose prompt is their instruction as it stands."""
        tasks = self.tasks
        return ListSource(
            [
                Example(id=name, prompt=tasks[name].steps[0].instruction)
                for name in self._names(split)
            ]
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
        """Return sandboxes that have the folders in which tasks work."""
        roots = {*_ROOTS, *self._roots}
        roots.update(root for image in self._images.values() for root in image.roots)
        venv = self.config.local_venv
        if venv:
            try:
                find_interpreter(f"{venv}/bin/python")
            except SandboxUnavailableError as error:
                raise EnvironmentLoadError(f"env.local_venv {venv!r}: {error}") from None
        # Encrypted connections to the hosts of a task need them.
        certificates = ssl.get_default_verify_paths().capath
        shown = [os.path.realpath(certificates)] if certificates else []
        return LocalProvider(
            read_only=(*read_only, *shown, *([venv] if venv else [])), writable=tuple(sorted(roots))
        )

    def place(self, episode: Episode[Any]) -> AgentPlace:
        """Return what the task asks for, and its step."""
        task, state = self.tasks[episode.example.id], episode.state
        ready: TaskSandbox | None = state.get("place")
        index: int = state.get("step", 0)
        return AgentPlace(
            spec=self._spec(task, image=state.get("image")),
            folder=None if ready is None else ready.folder,
            environment={
                **self._variables(task.image),
                **({} if ready is None else ready.proxy),
            },
            timeout_s=self._agent_s(task.steps[index]),
            timeout_name=self._agent_limit(task.steps[index]),
            opens_endpoint=self.config.sandbox in ("local", "docker"),
            mcp_servers={one.name: one.entry() for one in task.image.table.mcp_servers},
        )

    @setup
    async def prepare(self, episode: Episode[Any]) -> None:
        """Make the sandbox of the task, and wait until it is ready."""
        task, state = self.tasks[episode.example.id], episode.state
        episode.tags["task_digest"] = task.digest
        if not self._is_local:
            requirements = self._harness.requirements if self.runs_agent else ()
            state["image"] = await self._built(task.image, requirements)
        place = await self._ready(task.image, await self.sandbox(episode))
        async with self._reaching(place, task.image.table.hosts) as reaching:
            await self._wait_until_healthy(reaching, task.image.table.healthcheck)
        state.update(place=place, step=0, graded=[])

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Play the steps of the task one after the other, as long as their rewards are enough."""
        task, state = self.tasks[episode.example.id], episode.state
        place, reason = cast(TaskSandbox, state["place"]), StopReason.COMPLETED
        for index, step in enumerate(task.steps):
            if index:
                before = task.steps[index - 1]
                await self._grade(episode)
                numbers, least = state["graded"][-1].numbers, before.min_rewards
                if any(numbers.get(name, -math.inf) < value for name, value in least.items()):
                    break
                state["step"] = index
                # The next agent sees nothing of how the one before was graded.
                left = ("/tests", "/logs/verifier") if before.grader is None else ()
                try:
                    await place.empty("/logs/agent", *left)
                    await self._copy_workdir(place, step)
                except SpoiledError as error:
                    state["graded"].append(ungraded(error))
                    break
                episode.add(step.instruction)
            else:
                await self._copy_workdir(place, step)
            async with self._reaching(place, task.image.table.hosts) as reaching:
                if step.workdir is not None and (step.workdir / "setup.sh").is_file():
                    done = await reaching.run(["bash", "setup.sh"], _SETUP_S)
                    place.require(done, f"setup.sh of its step {step.name!r} failed")
                await self._wait_until_healthy(reaching, step.healthcheck)
            async with self._reaching(place, step.agent_hosts) as state["place"]:
                reason = await self.play_step(episode, step)
        return reason

    async def _copy_workdir(self, place: TaskSandbox, step: HarborStep) -> None:
        if step.workdir is not None and step.workdir.is_dir():
            await place.unpack(await asyncio.to_thread(packed, step.workdir), place.folder)

    async def play_step(self, episode: Episode[Any], step: HarborStep) -> StopReason:
        """Let the agent do what `step` says."""
        return await self.run_program(episode, step.instruction)

    async def score(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> Rollout:
        """Grade the last step that was played, and take the reward from all of them."""
        state = episode.state
        if "place" not in state:
            raise ConfigError(
                f"{example.id}: a task of Harbor is graded in the sandbox of its rollout, which is "
                "gone; play it again"
            )
        if len(state["graded"]) <= state["step"]:
            await self._grade(episode, is_last=True)
        steps: list[Graded] = state["graded"]
        numbers = combined(self.tasks[example.id], steps)
        state["reward"] = numbers.pop("reward")
        done = await super().score(rollout, example, episode)
        numbers["verifier_s"] = sum(step.wall_s for step in steps)
        if self.tasks[example.id].table.steps:
            numbers["num_steps"] = len(steps)
            for index, step in enumerate(steps, 1):
                numbers[f"step_{index}_reward"] = step.numbers.get("reward", 0.0)
        return replace(done, metrics={**done.metrics, **numbers})

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
        values = [image.table.env for image in task.images]
        values += [step.verifier_env for step in task.steps]
        values += [server.variables for server in task.image.table.mcp_servers]
        found = [
            f"{task.name} needs the variable {name}, which is not set or not granted; set it, and "
            f"link with --secret {name}"
            for name in dict.fromkeys(name for one in values for name in unset_variables(one))
        ]
        for image in task.images:
            table = image.table
            if self._is_local:
                try:
                    self._images[image.name] = local_image(image, settings.local_skips)
                    self._roots.update(
                        root_of(one.source, image.name)
                        for step in task.steps
                        for one in (step.artifacts if step.grader is not None else ())
                        if one.source.startswith("/")
                    )
                except ConfigError as error:
                    found.append(str(error))
            elif not table.docker_image and not image.dockerfile:
                found.append(
                    f"{image.name} has no environment/Dockerfile and names no "
                    "environment.docker_image"
                )
            elif settings.sandbox != "docker" and (
                table.hosts or (image is task.image and table.hosts is not None)
            ):
                found.append(
                    f"{image.name} is not public throughout (network_mode), but sandboxes of "
                    f"{settings.sandbox!r} reach their model over the internet"
                )
            elif settings.sandbox != "docker" and not table.docker_image:
                found.append(
                    f"{image.name} has an image that must be built; sandbox {settings.sandbox!r} "
                    "takes only those that are"
                )
            elif settings.sandbox != "docker" and not table.workdir:
                found.append(
                    f"{image.name} needs environment.workdir with sandboxes of {settings.sandbox!r}"
                )
        return found

    def _agent_limit(self, step: HarborStep) -> Literal["agent_timeout_s", "agent.timeout_sec"]:
        """Return the name of the agent's time limit: a setting, or what the task says."""
        is_set = "agent_timeout_s" in cast(HarborConfig, self.config).model_fields_set
        return "agent_timeout_s" if is_set or step.agent_s is None else "agent.timeout_sec"

    def _agent_s(self, step: HarborStep) -> float:
        own = step.agent_s
        if own is None or self._agent_limit(step) == "agent_timeout_s":
            return cast(HarborConfig, self.config).agent_timeout_s
        return own

    def _spec(
        self, task: HarborTask, sandbox: TaskImage | None = None, *, image: str | None = None
    ) -> SandboxSpec:
        """Return what the agent's sandbox, or another one of the task, has.

        `image` is known once it was built.
        """
        of_agent = sandbox is None or sandbox is task.image
        settings, table = cast(HarborConfig, self.config), (sandbox or task.image).table
        memory_mb = settings.memory_mb or table.memory_mb or _MEMORY_MB
        disk_mb = None if settings.sandbox == "docker" else table.storage_mb
        if self._is_local:
            # Its files are in memory, and count as memory.
            disk_mb = min(disk_mb or memory_mb, memory_mb)
        has_network = table.network_mode == "public" and not self._is_local
        alone = Network.ENDPOINT if of_agent or table.allowed_hosts else Network.NONE
        life_s = sum(self._agent_s(step) + step.verifier_s for step in task.steps)
        return SandboxSpec(
            image=image,
            cpus=settings.cpus or table.cpus,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            max_processes=_PROCESSES,
            time_to_live_s=life_s + _MARGIN_S,
            network=Network.FULL if has_network else alone,
        )

    def _require_room(self) -> None:
        """Raise EnvironmentLoadError that names the tasks for which this machine is too small."""
        if not isinstance(self._provider, LocalProvider | DockerProvider):
            return
        problems: list[str] = []
        wanted = [(task, image) for task in self.tasks.values() for image in task.images]
        try:
            self._provider.require(self._spec(task, image) for task, image in wanted)
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(
                f"{error}. Its address is the setting docker_url; or set sandbox to local"
            ) from None
        except SandboxLimitError:
            for task, image in wanted:
                try:
                    self._provider.require([self._spec(task, image)])
                except SandboxLimitError as error:
                    problems.append(f"{image.name}: {error}")
        require_none(problems)

    async def _built(self, image: TaskImage, requirements: Sequence[str]) -> str:
        """Return the name of an image, which is built or pulled if it is not there."""
        if not isinstance(self._provider, DockerProvider):
            return str(image.table.docker_image)
        context, tag = await asyncio.to_thread(build_of, image, requirements)
        async with self._building.setdefault(tag, asyncio.Lock()):
            await self._provider.build(context, tag, image.table.build_timeout_sec)
        return tag

    def _variables(self, image: TaskImage) -> dict[str, str]:
        own = resolved(image.table.env)
        if not self._is_local:
            return own
        return self._with_venv({**self._images[image.name].environment, **own})

    def _with_venv(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` with the programs of the chosen virtual environment first."""
        venv = self.config.local_venv
        if not venv:
            return dict(variables)
        path = variables.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
        return {**variables, "PATH": f"{venv}/bin:{path}", "VIRTUAL_ENV": venv}

    async def _ready(self, image: TaskImage, box: Sandbox) -> TaskSandbox:
        """Return a new sandbox once it has what its image says."""
        variables = self._variables(image)
        if not self._is_local:
            home = "/root"
            if user_of(image.dockerfile):
                home = (await box.run(["sh", "-c", _HOME])).text.strip() or "/"
            variables = {"HOME": home, **variables}
        place = TaskSandbox(task=image.name, box=box, folder="/", variables=variables)
        place.require(await box.run(["sh", "-c", _NEW_FOLDERS]), "/logs and /tests cannot be made")
        folder = image.table.workdir
        if self._is_local:
            local = self._images[image.name]
            folder = local.folder
            for step in local.steps:
                if step.files:
                    await place.unpack(step.files, "/")
                if step.command:
                    done = await box.run(
                        ["sh", "-c", step.command],
                        environment=self._with_venv(step.environment),
                        folder=step.folder,
                        timeout_s=image.table.build_timeout_sec,
                    )
                    place.require(done, f"`{step.command:.80}` of its Dockerfile failed")
        elif not folder:
            # Process 1 stands where the image says.
            folder = (await box.run(["readlink", "/proc/1/cwd"])).text.strip() or "/"
        return replace(place, folder=folder)

    async def _grade(self, episode: Episode[Any], *, is_last: bool = False) -> None:
        """Grade the step that was played; after the last one nothing else is done with its sandbox.

        A verifier's own sandbox is closed when it has ended.
        """
        task, state = self.tasks[episode.example.id], episode.state
        step, place = task.steps[cast(int, state["step"])], cast(TaskSandbox, state["place"])
        async with self._reaching(place, task.image.table.hosts) as reaching:
            for hook in step.collect:
                await reaching.run(["sh", "-c", hook.command], hook.timeout_sec)
        if step.grader is None:
            async with self._reaching(place, step.verifier_hosts) as reaching:
                try:
                    found = await graded(reaching, step)
                except SpoiledError as error:
                    found = ungraded(error)
        else:
            files = await carried(place, step)
            if is_last:
                await self._sandboxes.release(episode)
            image = None if self._is_local else await self._built(step.grader, ())
            # Not one of the pool: who waits there for a second one may wait for others who do.
            box = await self._provider.create(self._spec(task, step.grader, image=image))
            try:
                own = await self._ready(step.grader, box)
                try:
                    await hand_over(own, files)
                    async with self._reaching(own, step.verifier_hosts) as reaching:
                        found = await graded(reaching, step)
                except SpoiledError as error:
                    found = ungraded(error)
            finally:
                await box.close()
        named = f"verifier {step.name}" if step.name else "verifier"
        episode.note(named, found.said, kind="stdout")
        state["graded"].append(found)

    @asynccontextmanager
    async def _reaching(
        self, place: TaskSandbox, hosts: tuple[str, ...] | None
    ) -> AsyncGenerator[TaskSandbox]:
        """Yield a sandbox whose commands reach `hosts` for a block; None = its network has all.

        With hosts, the sandbox has no network, so nothing goes past the proxy.
        """
        if not hosts or (self._is_local and hosts == EVERYWHERE):
            yield replace(place, proxy={})
            return
        async with (
            proxy_for(self.allowed_hosts(hosts)) as port,
            place.box.opened("127.0.0.1", port) as address,
        ):
            yield replace(place, proxy=proxy_variables(address))

    async def _wait_until_healthy(self, place: TaskSandbox, check: HealthCheck | None) -> None:
        if check is None:
            return
        began_s, num_failed = time.monotonic(), 0
        while True:
            done = await place.run(["sh", "-c", check.command], check.timeout_sec)
            if done.succeeded:
                return
            is_starting = time.monotonic() - began_s < check.start_period_sec
            num_failed += not is_starting
            if num_failed >= check.retries:
                place.require(done, f"its health check failed {num_failed} times")
            await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)


class HarborOracle(HarborEnvironment):
    """Plays the solution that a task brings, or nothing at all, in place of an agent."""

    harness = CommandHarness(argv=("true",))
    runs_agent = False
    plays_solution = True

    async def play_step(self, episode: Episode[Any], step: HarborStep) -> StopReason:
        """Run the solution of the step to its end, whatever its exit code."""
        if not episode.turns:
            # A rollout that asks the policy nothing has no reward.
            await episode.generate()
        if not self.plays_solution:
            return StopReason.COMPLETED
        place: TaskSandbox = episode.state["place"]
        await place.unpack(await asyncio.to_thread(packed, step.solution), "/solution")
        variables = {
            "DEBIAN_FRONTEND": "noninteractive",
            **self.tasks[episode.example.id].table.solution.env,
        }
        done = await place.run(["bash", "/solution/solve.sh"], self._agent_s(step), variables)
        episode.note("solution", f"{done.text}\n{done.error_text}"[-_SAID:], kind="stdout")
        return StopReason.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """The rewards of a task for its own solution, and for doing nothing."""

    task: str
    solution: float | None
    """None = it has none, or it could not be graded."""
    nothing: float | None
    problems: tuple[str, ...]


async def check_tasks(
    settings: Mapping[str, Any], num_tasks: int, tell: Callable[[TaskCheck], None]
) -> list[TaskCheck]:
    """Play the solution and nothing at all for the first tasks; `tell` hears of each at its end.

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
        if plays_solution and task.missing_solution:
            problems.append(f"it brings no {task.missing_solution}")
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
            said = next((one.value for one in rollout.info[::-1] if "verifier" in one.key), "")[
                -300:
            ]
            problems.append(f"{who} earns {total:g} of {highest:g}; the tests said last: {said!r}")
    return TaskCheck(
        task=task.name,
        solution=earned[True],
        nothing=earned[False],
        problems=tuple(problems),
    )
