"""`AgentEnvironment`: an agent program plays each rollout, in a sandbox.

The sandbox reaches the rollout's endpoint and nothing else. Requests there are answered by the
policy, recorded, and trained on as every turn is. Rewards look at the files that are left.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field

from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.types import Message, StopReason
from telescope_core.environments import Environment, EnvironmentConfig, Episode, cleanup
from telescope_core.environments.building import class_location, require_none_of
from telescope_core.harnesses.installed import harness_names, open_harness, require_installed
from telescope_core.harnesses.protocol import AGENT_FOLDER, AgentProgram, AgentTask, Harness
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.protocol import (
    CommandResult,
    Network,
    Sandbox,
    SandboxFileError,
    SandboxProvider,
    SandboxSpec,
    StopCause,
)
from telescope_core.sandboxes.tools import EpisodeSandboxes

_NOTED = 20_000
"""Most characters of each output of a program that are recorded."""
_VARIABLES = {"HOME": AGENT_FOLDER, "PYTHONUNBUFFERED": "1"}
"""Of every program. One in Python writes at once: its last words are kept if it is ended."""


class AgentConfig(EnvironmentConfig):
    """Settings of every environment that an agent plays."""

    harness: str = ""
    """Name of the agent program; empty = the environment's own."""
    harness_options: dict[str, Any] = Field(default={})
    """Options of that harness, such as `argv` of `command`."""
    max_turns: int = Field(default=30, ge=1)
    """Most requests of the program to the model, for programs that count them."""
    agent_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which the program is ended; its result up to then is scored."""
    max_sandboxes: int = Field(default=16, ge=1)
    """Most sandboxes at once; further rollouts wait for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """Sandbox, folder and time limit of one rollout's agent."""

    spec: SandboxSpec
    """Requirements on its sandbox."""
    folder: str | None = None
    """Folder in which the program starts; None = that of all commands."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the program, besides those of its harness."""
    timeout_s: float
    """Seconds after which the program is ended; its result up to then is scored."""
    timeout_name: str = "agent_timeout_s"
    """The setting that `timeout_s` is from, for messages."""
    opens_endpoint: bool
    """Whether the endpoint must be opened to the sandbox, because it has no other network."""
    mcp_servers: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict[str, Mapping[str, object]]
    )
    """See `AgentTask.mcp_servers`."""


class AgentEnvironment(Environment):
    """An agent program plays each rollout in a sandbox of its own.

    Set `harness`, put files into the sandbox in a `@setup`, and inspect them in rewards. The task
    is the prompt, and the completion is the program's answer at its end.
    """

    Config: ClassVar[type[EnvironmentConfig]] = AgentConfig
    harness: ClassVar[str | Harness] = ""
    """The agent program: the name of a harness, or an instance such as `CommandHarness(...)`."""
    sandbox_spec: ClassVar[SandboxSpec] = SandboxSpec(
        memory_mb=2048,
        disk_mb=256,
        max_processes=256,
        time_to_live_s=3600.0,
        network=Network.ENDPOINT,
    )
    """Requirements on each sandbox."""
    agent_python: ClassVar[str] = "python3"
    """Python interpreter for the program if `provider` supplies images."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reason = "it is a setting: --env.NAME VALUE, or a default in a Config of your own"
        require_none_of(cls, {*AgentConfig.model_fields} - {*vars(AgentEnvironment)}, reason=reason)

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        life_s, longest_s = self.sandbox_spec.time_to_live_s, self.config.agent_timeout_s
        if longest_s >= life_s:
            raise ConfigError(
                f"env.agent_timeout_s must be below the {life_s:g} s that a sandbox lives, got "
                f"{longest_s:g}; give sandbox_spec of {class_location(type(self))} a longer "
                "time_to_live_s"
            )
        self._harness = self._chosen()
        self._provider, self._python = self._place()
        self._sandboxes = EpisodeSandboxes(
            self._provider, self.sandbox_spec, max_open=self.config.max_sandboxes
        )
        # The last one is called first.
        self.on_close(self._provider.close)
        self.on_close(self._sandboxes.close)

    @property
    def offers_tools(self) -> bool:
        """Whether the program's requests offer tools."""
        return self._harness.offers_tools

    def provider(self) -> SandboxProvider | None:
        """Return the provider of sandboxes; None = this machine, with the program's packages.

        The images of another provider have the program, and `agent_python` runs it.
        """
        return None

    def local_provider(self, read_only: tuple[str, ...]) -> SandboxProvider:
        """Return the provider of sandboxes on this machine, whose programs can read `read_only`."""
        return LocalProvider(read_only=read_only)

    def place(self, episode: Episode[Any]) -> AgentPlace:
        """Return the place of a rollout's agent; the same for all unless overridden."""
        return AgentPlace(
            spec=self.sandbox_spec,
            timeout_s=self.config.agent_timeout_s,
            opens_endpoint=self.sandbox_spec.network is not Network.FULL,
        )

    async def sandbox(self, episode: Episode[Any]) -> Sandbox:
        """Return the sandbox of a rollout, which is created on first use."""
        return await self._sandboxes.sandbox(episode, self.place(episode).spec)

    async def file_text(self, episode: Episode[Any], path: str) -> str | None:
        """Return a file of the sandbox as text; None if it cannot be read."""
        try:
            return (await (await self.sandbox(episode)).read(path)).decode(errors="replace")
        except SandboxFileError:
            return None

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Run the program to its end; raises SandboxError when the provider fails."""
        text = "\n\n".join(message.content for message in episode.messages)
        return await self.run_program(episode, text)

    async def run_program(self, episode: Episode[Any], text: str) -> StopReason:
        """Run the program to its end with the task `text`, and add its answer to the episode.

        A rollout may run it several times. Raises SandboxError when the provider fails.
        """
        box, place = await self.sandbox(episode), self.place(episode)
        episode.tags.pop("time_limit", None)
        endpoint = episode.endpoint
        async with opened_to(box, place, endpoint.base_url) as base_url:
            program = self._harness.program(
                AgentTask(
                    text=text,
                    base_url=base_url,
                    api_key=endpoint.api_key,
                    model=endpoint.model,
                    python=self._python,
                    max_turns=self.config.max_turns,
                    mcp_servers=place.mcp_servers,
                )
            )
            files = dict(program.files)
            if program.answer_file and "agent_ended" in episode.tags:
                # The one that ran before has left its answer there.
                files.setdefault(program.answer_file, "")
            for path, content in files.items():
                await box.write(path, content.encode())
            done = await box.run(
                program.argv,
                environment={**_VARIABLES, **place.environment, **program.environment},
                timeout_s=place.timeout_s,
                folder=place.folder,
            )
        _record(episode, done)
        is_late = done.stop is StopCause.TIMEOUT
        if is_late:
            episode.tags["time_limit"] = f"{place.timeout_name} = {place.timeout_s:g} s"
        answer = await self._answer(box, program, done)
        episode.add(Message(role="assistant", content=answer))
        if is_late:
            return StopReason.TIMEOUT
        is_cut = done.stop is StopCause.EXITED and done.exit_code == program.max_turns_exit_code
        return StopReason.MAX_TURNS if is_cut else StopReason.COMPLETED

    @cleanup
    async def give_back_sandbox(self, episode: Episode[Any]) -> None:
        """End every process of the rollout, and return its sandbox."""
        await self._sandboxes.release(episode)

    def _chosen(self) -> Harness:
        name: str = self.config.harness
        options: dict[str, Any] = self.config.harness_options
        own = self.harness
        if not name and not isinstance(own, str):
            if options:
                raise ConfigError(
                    f"env.harness_options are for a harness that is named, and "
                    f"{class_location(type(self))} has made its own; set env.harness too"
                )
            return own
        chosen = name or str(own)
        if not chosen:
            raise EnvironmentLoadError(
                f"{class_location(type(self))} must set harness, the agent program that plays: "
                f"{', '.join(harness_names())}"
            )
        return open_harness(chosen, **options)

    def _place(self) -> tuple[SandboxProvider, str]:
        """Return the provider of sandboxes, and the interpreter in them with the packages."""
        given = self.provider()
        if given is not None:
            return given, self.agent_python
        interpreter = find_interpreter().path
        if not self._harness.requirements:
            return self.local_provider(()), interpreter
        folder = require_installed(self._harness, interpreter)
        return self.local_provider((str(folder),)), str(folder / "bin" / "python")

    async def _answer(self, box: Sandbox, program: AgentProgram, done: CommandResult) -> str:
        """Return the program's answer; empty if it left none that can be read."""
        if not program.answer_file:
            return self._harness.answer(done.text)
        try:
            written = (await box.read(program.answer_file)).decode(errors="replace")
            return self._harness.answer(written)
        except (SandboxFileError, ValueError, LookupError, TypeError, AttributeError):
            # The model's commands can reach the file too, so what it holds proves nothing.
            return ""


@asynccontextmanager
async def opened_to(box: Sandbox, place: AgentPlace, base_url: str) -> AsyncGenerator[str]:
    """Yield the address at which the sandbox reaches the endpoint."""
    if not place.opens_endpoint:
        yield base_url
        return
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"a sandbox is opened to endpoints of http alone, got {base_url!r}; set "
            "network=Network.FULL in sandbox_spec, with a provider that gives it"
        )
    async with box.opened(parts.hostname, parts.port or 80) as address:
        yield urlunsplit(parts._replace(netloc=address))


def _record(episode: Episode[Any], done: CommandResult) -> None:
    """Record how the rollout's program ended, and its output."""
    ended = f"exit {done.exit_code}" if done.stop is StopCause.EXITED else done.stop.value
    episode.tags["agent_ended"] = ended
    episode.metrics["agent_s"] = episode.metrics.get("agent_s", 0.0) + done.wall_s
    if done.stdout:
        episode.note("agent_stdout", done.text[-_NOTED:], kind="stdout")
    if done.stderr:
        episode.note("agent_stderr", done.error_text[-_NOTED:], kind="stderr")
