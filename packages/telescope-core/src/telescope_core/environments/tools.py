"""`ToolEnvironment`: the policy calls tools until it answers without a call."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from telescope_core.environments.base import Environment
from telescope_core.environments.episode import Episode
from telescope_core.environments.mcp import McpConnections, McpServer
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.environments.tool_calls import tools_prompt, turn_calls
from telescope_core.environments.tool_functions import (
    Tool,
    ToolFunction,
    tool_from,
    tool_methods,
)
from telescope_core.environments.tool_threads import DaemonThreads
from telescope_core.environments.toolbox import Toolbox, ToolConfig, require_distinct
from telescope_core.environments.turns import MultiTurnEnvironment
from telescope_core.errors import EnvironmentLoadError
from telescope_core.types import Message, StopReason


class ToolEnvironment(MultiTurnEnvironment):
    """A conversation in which the policy may call tools; it ends with a turn that calls none.

    Tools are methods with `@tool`, and what `tools` returns: functions, sync or async, typed and
    with docstrings, and `McpServer`s. The calls of one turn run at the same time. What goes wrong
    in a call is answered to the policy and counted in the metrics `tool_errors/...`.
    """

    Config: ClassVar[type[EnvironmentConfig]] = ToolConfig

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._threads = DaemonThreads()
        self._functions: list[Tool] | None = None
        self._connections: McpConnections | None = None
        self._toolboxes: WeakKeyDictionary[Episode, Toolbox] = WeakKeyDictionary()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.Config, ToolConfig):
            raise EnvironmentLoadError(
                f"{cls.__name__}.Config must subclass ToolConfig, which has the settings of tools: "
                "write `class Config(ToolConfig):`"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Environment:
        """Build it, and check its tools: a bad one is told before the first rollout."""
        environment = super().from_settings(settings)
        assert isinstance(environment, ToolEnvironment), "from_settings builds its own class"
        environment.function_tools()
        return environment

    def tools(self) -> Sequence[ToolFunction | McpServer]:
        """Return functions the policy may call and MCP servers, beside the `@tool` methods."""
        return ()

    def function_tools(self) -> list[Tool]:
        """Return the tools that are functions; raises EnvironmentLoadError for a wrong one."""
        if self._functions is None:
            given = list(self.tools())
            servers = [one for one in given if isinstance(one, McpServer)]
            functions = [one for one in given if not isinstance(one, McpServer)]
            found = [tool_from(one, self._threads) for one in (*tool_methods(self), *functions)]
            if not found and not servers:
                raise EnvironmentLoadError(
                    f"{type(self).__name__} has no tools; mark methods with @tool, or return "
                    "functions or McpServers from tools(self)"
                )
            require_distinct(found)
            self._connections = McpConnections(servers) if servers else None
            self._functions = found
        return self._functions

    def opening(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Return the prompt; with `xml`, the tools stand in the system message."""
        messages = super().opening(prompt)
        if self.config.tool_call_format == "native":
            return messages
        found = self.function_tools()
        about = tools_prompt([*found, *(self._connections.listed if self._connections else ())])
        if messages and messages[0].role == "system":
            about = f"{messages[0].content}\n\n{about}"
            messages = messages[1:]
        return [Message(role="system", content=about), *messages]

    async def play(self, episode: Episode) -> StopReason:
        """Answer tool calls until a turn has none, a turn is truncated, or `max_turns`."""
        async with AsyncExitStack() as stack:
            tools = self.function_tools()
            if self._connections is not None:
                tools = [*tools, *await self._connections.tools(stack)]
                require_distinct(tools)
                # Only now is known what the servers offer, which the prompt has to say.
                opening = await self.first_messages(episode.example)
                episode.messages[: episode.num_opening_messages] = opening
            toolbox = self._toolboxes[episode] = Toolbox(tools, self.config)
            episode.metrics.update(toolbox.metrics())
            if self.config.tool_call_format == "native":
                episode.tools = [tool.schema for tool in tools]
            return await super().play(episode)

    async def env_response(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, messages: Sequence[Message], episode: Episode
    ) -> str | Sequence[Message] | None:
        """Answer the calls of the last message; None when it makes none.

        In the last turn none is made: nobody would read the results.
        """
        turn = turn_calls(messages[-1])
        if not turn.calls:
            return None
        if len(episode.turns) >= self.max_turns:
            return ()
        return await self._toolboxes[episode].answer(turn, episode)

    async def close(self) -> None:
        """End the MCP servers it started."""
        await super().close()
        if self._connections is not None:
            await self._connections.close()
