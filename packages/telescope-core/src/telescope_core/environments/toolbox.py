"""`Toolbox`: the tools of one rollout; runs the calls of a turn concurrently and counts them."""

import asyncio
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from telescope_core.base.errors import EnvironmentLoadError, TelescopeError, nearest
from telescope_core.base.terminal import whole
from telescope_core.base.types import Message, ToolCall
from telescope_core.environments.author_errors import as_failure
from telescope_core.environments.doing import doing
from telescope_core.environments.episode import Episode
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.environments.tool_calls import (
    ToolCallFormat,
    ToolFailure,
    ToolOutcome,
    ToolUse,
    TurnCalls,
)
from telescope_core.environments.tool_functions import BadArgumentsError, Tool, ToolError

_SHOWN = 100
"""Most characters of a malformed call that are shown to the policy again."""


class ToolConfig(EnvironmentConfig):
    """Settings of every environment with tools; subclass it to add your own."""

    tool_call_format: ToolCallFormat = "xml"
    """With `xml`, the system prompt lists the tools, and calls are <tool_call> tags in the text.
    With `native`, the model's chat template lists the tools, and calls are the message's
    `tool_calls`."""
    tool_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a tool call may take, unless `@tool(timeout_s=...)` sets another limit."""
    max_tool_characters: Annotated[int, Field(ge=1)] = 8192
    """Most characters of a tool result; longer results are cut."""


class Toolbox:
    """The tools of one rollout."""

    def __init__(self, tools: Sequence[Tool], config: ToolConfig) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._config = config
        self._use = ToolUse(list(self._tools))

    def metrics(self) -> dict[str, float]:
        """Return the counts of calls and errors so far."""
        return self._use.metrics()

    async def answer(self, turn: TurnCalls, episode: Episode[Any]) -> list[Message]:
        """Run the calls of one turn and return messages to the policy with their results.

        The policy receives errors in a call, except a TelescopeError: something that the rollout
        depends on is missing, so that the rollout fails.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._outcome(one, episode)) for one in turn.calls]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        outcomes = [task.result() for task in tasks]
        self._use.add(outcomes)
        episode.metrics.update(self.metrics())
        return turn.answers(outcomes)

    async def _outcome(self, one: ToolCall, episode: Episode[Any]) -> ToolOutcome:
        tool = self._tools.get(one.name)
        if tool is None:
            return self._no_tool(one)
        limit_s = tool.timeout_s or self._config.tool_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            what = f"tool {tool.name} ({tool.origin}) ran"
            async with deadline:
                with doing(what):
                    result = await tool.run(one.arguments, episode)
            return self._result(tool.name, result)
        except TelescopeError:
            raise
        except BadArgumentsError as error:
            failure, reason = ToolFailure.BAD_ARGUMENTS, str(error)
        except ToolError as error:
            failure, reason = ToolFailure.REFUSED, str(error)
        except BaseException as error:  # noqa: BLE001 - a boundary: the policy is told about it
            as_failure(error)
            if deadline.expired():
                failure = ToolFailure.TIMED_OUT
                reason = f"{tool.name} did not return within {limit_s:g} s"
            else:
                failure, reason = ToolFailure.RAISED, f"{type(error).__name__}: {error}"
                frames = traceback.extract_tb(error.__traceback__)
                where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
                episode.tags.setdefault("tool_exception", f"{tool.name}: {reason}{where}")
        return ToolOutcome(name=tool.name, text=self._cut(f"error: {reason}"), failure=failure)

    def _result(self, name: str, found: str | Message) -> ToolOutcome:
        if isinstance(found, str):
            return ToolOutcome(name=name, text=self._cut(found))
        content, limit = found.content, self._config.max_tool_characters
        # The text may be written longer, or cut; the pictures of what is cut stand at its end.
        places = [min(len(whole(content[: image.at])), limit) for image in found.images]
        images = [replace(one, at=at) for one, at in zip(found.images, places, strict=True)]
        return ToolOutcome(name=name, text=self._cut(content), images=tuple(images))

    def _no_tool(self, one: ToolCall) -> ToolOutcome:
        if not one.name:
            text = (
                'a call must be a JSON object such as {"name": "...", "arguments": {...}}, got '
                f"{one.arguments[:_SHOWN]!r}"
            )
            failure = ToolFailure.MALFORMED
        else:
            names = nearest(one.name, self._tools) or sorted(self._tools)
            text = f"there is no tool {one.name!r}; there is {', '.join(names)}"
            failure = ToolFailure.UNKNOWN_TOOL
        return ToolOutcome(name=one.name, text=self._cut(f"error: {text}"), failure=failure)

    def _cut(self, text: str) -> str:
        # The policy may have written the text that a tool read, so the rollout must not fail.
        text, limit = whole(text), self._config.max_tool_characters
        return text if len(text) <= limit else f"{text[:limit]} (cut: {len(text)} characters)"


def require_distinct(tools: Sequence[Tool]) -> None:
    """Raise EnvironmentLoadError when two tools have the same name."""
    seen: dict[str, Tool] = {}
    for tool in tools:
        other = seen.setdefault(tool.name, tool)
        if other is not tool:
            raise EnvironmentLoadError(
                f"two tools are called {tool.name!r}: {other.origin} and {tool.origin}; rename "
                "one, or set a prefix on its MCP server"
            )
