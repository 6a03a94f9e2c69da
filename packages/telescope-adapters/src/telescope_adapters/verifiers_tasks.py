"""Tasksets of the `verifiers` package from 0.4 on, its new API: `verifiers:NAME`.

A program of theirs, the harness, plays a task by asking a server of theirs, which passes each
request on to a `PolicyShim`. Their task scores; what raises fails the rollout here.
"""

import asyncio
import itertools
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from aiohttp import web
from pydantic import Field, ValidationError

from telescope_adapters.frameworks import VERIFIERS, VERIFIERS_TASKS, imported, missing_import
from telescope_adapters.requests import Requests
from telescope_adapters.settings import (
    AdaptedConfig,
    AdaptedEnvironment,
    as_metrics,
    as_number,
    set_option,
)
from telescope_adapters.verifiers import as_messages, own_reward, without_signal_handlers
from telescope_core.base.code_places import raised_at, told_at
from telescope_core.base.errors import ConfigError, EnvironmentLoadError, TelescopeError
from telescope_core.base.setting_problems import SettingProblem, problems_of
from telescope_core.base.types import Example, Split, StopReason
from telescope_core.environments import Episode, reward
from telescope_core.environments.building import told_of
from telescope_core.examples import ListSource, split_of
from telescope_core.gateway.listener import ChatServer, answer_chat, read_chat
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import read_request

_CHAT = "chat"
_MODEL = "policy"
"""Name of the model in requests and answers."""
_TAKEN = ("theirs", "reward", "mean")
"""Names that results and curves use for the reward here and for the total."""
_CHAT_MODULE = "telescope_chat_harness"


@dataclass(slots=True, kw_only=True, eq=False)
class Playing:
    """A rollout whose framework sends requests here."""

    requests: Requests
    failed: list[Exception] = field(default_factory=list[Exception])
    """Errors of the policy, which the framework sees as refusals."""


class PolicyShim:
    """A chat endpoint on this machine whose requests name the rollout in a header.

    Their client is created once for an address, so rollouts cannot have separate ones. Requests are
    answered by `Episode.generate`.
    """

    def __init__(self, header: str) -> None:
        """`header`: name of the header with the name of the rollout."""
        self._header = header
        self.playing: dict[str, Playing] = {}
        """The rollouts whose requests are answered, by name."""
        self._server = ChatServer([("POST", "/v1/chat/completions", self._answer)])

    @property
    def base_url(self) -> str:
        """Its address, once it has started."""
        return f"{self._server.address}/v1"

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        await self._server.start()

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        playing = self.playing.get(request.headers.get(self._header, ""))
        if playing is None:
            raise Refusal("no rollout of this name is being played", status=404)
        sampling = playing.requests.episode.sampling
        try:
            asked = await read_chat(
                request, lambda body: read_request(body, sampling, model=_MODEL)
            )
            said = await playing.requests.answer(asked.messages, tools=asked.tools)
        except Refusal as refusal:
            playing.failed.append(refusal)
            raise
        except TelescopeError as error:
            # Raised again where the rollout is played; a framework tries again after a 5xx.
            playing.failed.append(error)
            raise Refusal(f"{type(error).__name__}: {error}") from None
        return answer_chat(said, asked, model=_MODEL)


class TasksConfig(AdaptedConfig):
    """Settings of a taskset of verifiers."""

    harness: str = _CHAT
    """The program that plays: `chat` asks once, in this process; else a harness of verifiers, which
    runs as a process of its own."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Only so many tasks, the first; required where a taskset is endless."""


class VerifiersTasksEnvironment(AdaptedEnvironment):
    """A taskset of the `verifiers` package."""

    Config = TasksConfig

    def __init__(self, config: TasksConfig | None = None) -> None:
        super().__init__(config)
        name = self.config.id.rpartition("/")[2].partition("@")[0]
        self._module = name.replace("-", "_").lower()
        self._theirs = imported(VERIFIERS_TASKS, "verifiers.v1")
        with without_signal_handlers(), told_of(f"the taskset {self.config.id}", self._module):
            try:
                self.env = self._loaded()
            except (ImportError, AttributeError, TypeError) as error:
                raise EnvironmentLoadError(f"{self.config.id}: {self._trouble(error)}") from error
            except SystemExit as error:
                # Their cloud's way to say that it has no key.
                raise EnvironmentLoadError(f"{self.config.id}: verifiers ended: {error}") from error
        taskset, limit = self.env.taskset, self.config.max_tasks
        if limit is None and not taskset.bounded:
            raise ConfigError(
                f"{self.config.id} has endless tasks; set env.max_tasks to how many are used"
            )
        with told_of(f"the tasks of {self.config.id}", self._module):
            self.tasks: list[Any] = list(itertools.islice(iter(taskset), limit))
        self._has_tools = any(one.toolsets(one.config) for one in (*self.tasks[:1], taskset))
        if self._has_tools and self.config.harness == _CHAT:
            raise EnvironmentLoadError(
                f"{self.config.id} has tools, which the harness 'chat' does not bring; set "
                "env.harness to one that does, such as null"
            )
        header: str = imported(VERIFIERS_TASKS, "verifiers.v1.clients.client").SESSION_ID_HEADER
        self._shim = PolicyShim(header)
        self._serving: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self.on_close(self._end_serving)

    @property
    def offers_tools(self) -> bool:
        """Whether requests offer tools: those of the taskset, or of a program."""
        return self._has_tools or self.config.harness not in (_CHAT, "null")

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have tasks."""
        keys = {split_of(task.key) for task in self.tasks}
        return tuple(split for split in Split if split in keys)

    def examples(self, split: Split) -> ListSource:
        """Return the tasks of `split`, chosen by a hash of their keys."""
        return ListSource(
            [
                Example(
                    id=f"{index}-{task.key[:16]}",
                    prompt=tuple(as_messages(_opening(task.data))),
                    info={"index": index},
                )
                for index, task in enumerate(self.tasks)
                if split_of(task.key) is split
            ]
        )

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Let the harness play a task with the policy as model, and let the task score it."""
        await self._served()
        playing = Playing(requests=Requests(episode))
        names: list[str] = []

        def admit(trace: Any) -> None:
            names.append(trace.id)
            self._shim.playing[trace.id] = playing

        # The next rollout must not see changes that this one makes to its task.
        task = copy(self.tasks[int(str(episode.example.info["index"]))])
        task.data = task.data.model_copy(deep=True)
        client = self._theirs.EvalClientConfig(
            base_url=self._shim.base_url, api_key_var="TELESCOPE_NO_KEY"
        )
        context = self._theirs.ModelContext(model=_MODEL, client=client)
        try:
            ended = await self.env.run_episode(task, context, on_trace=admit)
        finally:
            for name in names:
                self._shim.playing.pop(name, None)
        if playing.failed:
            raise playing.failed[0]
        return self._taken(episode, ended)

    @reward
    def theirs(self, episode: Episode[Any]) -> float:
        """The reward of the task."""
        return own_reward(episode)

    def _taken(self, episode: Episode[Any], ended: Any) -> StopReason:
        """Record the result of a verifiers episode, and return its stop reason."""
        errors = [*ended.errors, *(error for trace in ended.traces for error in trace.errors)]
        if not ended.ok or errors:
            said = "; ".join(
                f"{error.type}: {error.message}{told_at(error.traceback, self._module)}"
                for error in errors
            )
            raise RuntimeError(f"verifiers failed the rollout: {said or 'it is not ok'}")
        trained = [trace for trace in ended.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise EnvironmentLoadError(
                f"{self.config.id} has {len(trained)} agents that are trained in one rollout; this "
                "adapter takes one"
            )
        [trace] = trained
        episode.messages[:] = as_messages(trace.messages)
        episode.metrics.update(_shown_scores(trace, of=self.config.id))
        episode.state["reward"] = as_number(trace.reward, of=self.config.id)
        episode.tags["stop_condition"] = str(trace.stop_condition)
        if trace.stop_condition == "max_turns":
            return StopReason.MAX_TURNS
        return StopReason.LENGTH if trace.is_truncated else StopReason.COMPLETED

    def _loaded(self) -> Any:
        single = imported(VERIFIERS_TASKS, "verifiers.v1.envs.single_agent")
        loaders = imported(VERIFIERS_TASKS, "verifiers.v1.utils.loaders")
        harness = self.config.harness
        if harness == _CHAT:
            harness = _CHAT_MODULE
            sys.modules.setdefault(_CHAT_MODULE, _chat_module(self._theirs))
        kind = loaders.environment_class(self.config.id)
        if kind is not single.SingleAgentEnv:
            raise EnvironmentLoadError(
                f"{self.config.id} has an environment class of its own ({kind.__name__}); this "
                "adapter takes tasksets that one agent plays"
            )
        # Their default is a cloud that needs a key.
        spec = {
            "taskset": {**self.config.options, "id": self.config.id},
            "agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
        try:
            made = single.SingleAgentEnvConfig.model_validate(spec)
        except ValidationError as error:
            raise self._wrong_options(problems_of(error, spec)) from error
        return self._theirs.load_environment(made)

    def _trouble(self, error: Exception) -> str:
        """Return why the taskset cannot be loaded, and what to do."""
        missing = error.__cause__
        name = missing.name if isinstance(missing, ImportError) else None
        if name and f"tried to import {name!r}" in str(error):
            return f"{error} `telescope env link --with PACKAGE` installs what is missing"
        if trouble := missing_import(error, VERIFIERS_TASKS, otherwise=VERIFIERS):
            return trouble
        if hasattr(sys.modules.get(self._module), "load_environment"):
            return (
                f"it has load_environment, of the API before verifiers {VERIFIERS.below}, and no "
                f"taskset; link it with --with {VERIFIERS.requirement}"
            )
        return f"{error}{raised_at(error, self._module)}"

    def _wrong_options(self, problems: Sequence[SettingProblem]) -> ConfigError:
        """Return an error that names each option of the taskset that is missing or wrong."""
        found: list[str] = []
        for one in problems:
            name = ".".join(str(part) for part in one.place if part != "taskset")
            got = "it is required" if one.is_missing else f"{one.message}, got {one.got}"
            found.append(f"option {name!r}: {got}")
        missing = [str(one.place[-1]) for one in problems if one.is_missing]
        advice = set_option(missing[0]) if missing else "correct env.options"
        return ConfigError(f"{self.config.id}: {'; '.join(found)}; {advice}")

    async def _served(self) -> None:
        """Start their server and ours, once; raises the error if that fails."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        waiting = asyncio.create_task(self._is_ready.wait())
        try:
            both: set[asyncio.Task[Any]] = {self._serving, waiting}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._serving.done():
            self._serving.result()

    async def _serve(self) -> None:
        """Hold both servers open in one task, which closes them at its end."""
        try:
            await self._shim.start()
            async with self.env.serving():
                self._is_ready.set()
                await asyncio.Event().wait()
        finally:
            await self._shim.close()

    async def _end_serving(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None


def _shown_scores(trace: Any, *, of: str) -> dict[str, float]:
    """Return the metrics of a trace and its named rewards, each as it was before its weight.

    A reward whose name is taken, by a metric or by what results name so themselves, gets an ending.
    """
    shown = as_metrics(trace.metrics, of=of)
    given = {name: one.score for name, one in trace.rewards.items() if one is not None}
    taken = {*_TAKEN, *trace.metrics}
    for name, score in as_metrics(given, of=of, kind="reward").items():
        while name in taken:
            name += "_score"
        taken.add(name)
        shown[name] = score
    return shown


def _opening(data: Any) -> list[Any]:
    """Return the first messages of a task."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    prompt = data.prompt
    if prompt is None:
        return system or [{"role": "user", "content": ""}]
    return [
        *system,
        *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt),
    ]


def _chat_module(theirs: Any) -> ModuleType:
    """Return a module with a harness that asks once, in this process, for their lookup.

    Theirs that does the same starts a process, which takes about a second and installs packages.
    """
    harnesses: Any = imported(VERIFIERS_TASKS, "verifiers.v1.harness")
    configs: Any = imported(VERIFIERS_TASKS, "verifiers.v1.configs.harness")
    runtimes: Any = imported(VERIFIERS_TASKS, "verifiers.v1.runtimes")
    httpx: Any = imported(VERIFIERS_TASKS, "httpx")
    clients: list[Any] = []

    class ChatHarness(harnesses.Harness[configs.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            *rest: Any,
            **_: Any,
        ) -> Any:
            _urls, data = rest[:2]
            system, prompt = self.resolve_prompt(data)
            shown = data.model_copy(update={"system_prompt": system, "prompt": prompt})
            messages: list[Any] = [
                one if isinstance(one, dict) else one.model_dump(exclude_none=True)
                for one in _opening(shown)
            ]
            if not clients:
                clients.append(httpx.AsyncClient(timeout=None))
            reply = await clients[0].post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            said = "" if reply.is_success else reply.text
            return runtimes.ProgramResult(0 if reply.is_success else 1, reply.text, said)

    module = ModuleType(_CHAT_MODULE)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module
