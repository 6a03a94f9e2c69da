"""`ToolEnvironment`: the policy calls tools until it answers without a call."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.types import Message, StopReason
from telescope_core.environments.base import Environment
from telescope_core.environments.building import told_of
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


class ToolEnvironment(MultiTurnEnvironment):
    """A conversation in which the policy may call tools; it ends with a turn without a call.

    The tools are the methods marked with `@tool`, and the functions and `McpServer`s that `tools`
    returns. Functions may be sync or async, and need type annotations and a docstring. The calls of
    one turn run concurrently. Errors in a call are sent to the policy and counted in the metrics
    `tool_errors/...`.
    """

    Config: ClassVar[type[EnvironmentConfig]] = ToolConfig

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        # Two underscores: an author's own attributes must not replace these.
        self.__threads = DaemonThreads()
        self.__functions: list[Tool] | None = None
        self.__connections: McpConnections | None = None
        self.__toolboxes: WeakKeyDictionary[Episode[Any], Toolbox] = WeakKeyDictionary()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.Config, ToolConfig):
            raise EnvironmentLoadError(
                f"{cls.__name__}.Config must subclass ToolConfig, which has the tool settings; "
                "write `class Config(ToolConfig):`"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Environment:
        """Build the environment and check its tools, so that errors show before any rollout."""
        environment = super().from_settings(settings)
        assert isinstance(environment, ToolEnvironment), "from_settings builds its own class"
        environment.function_tools()
        return environment

    def require_built(self) -> None:
        """Raise EnvironmentLoadError when the constructor left out what playing needs."""
        super().require_built()
        if not hasattr(self, "_ToolEnvironment__threads"):
            raise EnvironmentLoadError(
                f"{location_of(type(self).__init__)} must begin with super().__init__(config)"
            )

    @property
    def offers_tools(self) -> bool:
        """Whether requests offer the tools; with `xml`, the system message lists them instead."""
        return self.config.tool_call_format == "native"

    @property
    def sends_system(self) -> bool:
        """With `xml`, True: the tools are in a system message."""
        has_listing = not self.offers_tools and self._is_ours("opening", "first_messages")
        return has_listing or super().sends_system

    @property
    def goes_on(self) -> bool | None:
        """False with `native`; with `xml`, calls are text, and turns go on up to `max_turns`."""
        if not self._is_ours("play", "env_response"):
            return None
        return not self.offers_tools and self.max_turns > 1

    def tools(self) -> Sequence[ToolFunction | McpServer]:
        """Return further functions and MCP servers for the policy, besides the `@tool` methods."""
        return ()

    def function_tools(self) -> list[Tool]:
        """Return the tools that are functions; raises EnvironmentLoadError for an invalid one."""
        if self.__functions is None:
            with told_of(location_of(self.tools)):
                returned: object = self.tools()
            if not isinstance(returned, list | tuple):
                raise EnvironmentLoadError(
                    f"{location_of(self.tools)} must return a list of functions and McpServers, "
                    f"got {returned!r:.80} ({type(returned).__name__})"
                )
            given = [*cast(Sequence[ToolFunction | McpServer], returned)]
            servers = [one for one in given if isinstance(one, McpServer)]
            functions = [one for one in given if not isinstance(one, McpServer)]
            found = [tool_from(one, self.__threads) for one in (*tool_methods(self), *functions)]
            if not found and not servers:
                raise EnvironmentLoadError(
                    f"{type(self).__name__} has no tools; mark methods with @tool, or return "
                    "functions or McpServers from tools(self)"
                )
            require_distinct(found)
            self.__connections = McpConnections(servers) if servers else None
            self.__functions = found
        return self.__functions

    def opening(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Return the first messages; with `xml`, the system message lists the tools."""
        messages = super().opening(prompt)
        if self.config.tool_call_format == "native":
            return messages
        found = self.function_tools()
        about = tools_prompt([*found, *(self.__connections.listed if self.__connections else ())])
        if messages and messages[0].role == "system":
            about = f"{messages[0].content}\n\n{about}"
            messages = messages[1:]
        return [Message(role="system", content=about), *messages]

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Answer tool calls until a turn has none, is truncated, or reaches `max_turns`."""
        async with AsyncExitStack() as stack:
            tools = self.function_tools()
            if self.__connections is not None:
                tools = [*tools, *await self.__connections.tools(stack)]
                require_distinct(tools)
                # The prompt must list the servers' tools, which are known only now.
                opening = await self.first_messages(episode.example)
                episode.messages[: episode.num_opening_messages] = opening
            toolbox = self.__toolboxes[episode] = Toolbox(tools, self.config)
            episode.metrics.update(toolbox.metrics())
            if self.config.tool_call_format == "native":
                episode.tools = [tool.schema for tool in tools]
            return await super().play(episode)

    async def env_response(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, messages: Sequence[Message], episode: Episode[Any]
    ) -> str | Sequence[Message] | None:
        """Run the tool calls of the last message; returns None when it has none.

        Calls in the last turn are not run, because the policy would not see their results.
        """
        turn = turn_calls(messages[-1])
        if not turn.calls:
            return None
        if len(episode.turns) >= self.max_turns:
            return ()
        return await self.__toolboxes[episode].answer(turn, episode)

    async def close(self) -> None:
        """Close the environment and its MCP servers. Idempotent."""
        try:
            await super().close()
        finally:
            if self.__connections is not None:
                await self.__connections.close()
