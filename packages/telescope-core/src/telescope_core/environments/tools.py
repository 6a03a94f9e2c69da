"""`ToolEnvironment`: the policy calls Python functions until it answers without a call."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from telescope_core.environments.base import Environment, EnvironmentConfig
from telescope_core.environments.episode import Episode
from telescope_core.environments.rewards import call
from telescope_core.environments.tool_functions import (
    Tool,
    ToolError,
    ToolFunction,
    tagged_calls,
    tool_from,
    tools_prompt,
)
from telescope_core.errors import EnvironmentLoadError, nearest
from telescope_core.types import Example, Message, StopReason, ToolCall

_SHOWN_ERRORS = (ToolError, ValueError, TypeError, LookupError, ArithmeticError, OSError)
"""What a tool may raise for the policy to see. Anything else is a defect and fails the rollout."""


class ToolEnvironment(Environment):
    """A conversation in which the policy may call tools; it ends with a turn that calls none.

    Return the functions from `tools`: sync or async, typed, with docstrings. Calls are taken from
    the message's native tool calls, or from `<tool_call>` tags in its text. What goes wrong in a
    call is answered to the policy and counted in the metric `tool_errors`.
    """

    max_turns: ClassVar[int] = 10
    max_tool_characters: ClassVar[int] = 8192
    """Longer results are cut."""
    tool_style: Literal["native", "tags"] = "native"
    """`tags` describes the tools in the system prompt, for models without native tool calls."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._tools: dict[str, Tool] = {}

    def tools(self) -> Sequence[ToolFunction]:
        """Return the functions the policy may call."""
        raise EnvironmentLoadError(f"{type(self).__name__} must define tools(self)")

    def initial_messages(self, example: Example) -> list[Message]:
        """Return the prompt; with `tags`, the tools stand in the system message."""
        messages = super().initial_messages(example)
        if self.tool_style == "native":
            return messages
        about = tools_prompt(list(self._known_tools().values()))
        if messages and messages[0].role == "system":
            about = f"{messages[0].content}\n\n{about}"
            messages = messages[1:]
        return [Message(role="system", content=about), *messages]

    async def play(self, episode: Episode) -> StopReason:
        """Answer tool calls until a turn has none, a turn is truncated, or `max_turns`."""
        tools = self._known_tools()
        schemas = [tool.schema for tool in tools.values()] if self.tool_style == "native" else []
        episode.metrics.update(tool_calls=0.0, tool_errors=0.0)
        for turn in range(self.max_turns):
            completion = await episode.generate(tools=schemas)
            if completion.finish_reason == "length":
                return StopReason.LENGTH
            native = completion.message.tool_calls
            calls = native or tagged_calls(completion.message.content)
            if not calls:
                return StopReason.COMPLETED
            if turn + 1 < self.max_turns:
                results = [await self._answer(tools, one, episode) for one in calls]
                episode.add(*_as_messages(calls, results, is_native=bool(native)))
        return StopReason.MAX_TURNS

    def _known_tools(self) -> dict[str, Tool]:
        if not self._tools:
            self._tools = {tool.name: tool for tool in map(tool_from, self.tools())}
        return self._tools

    async def _answer(self, tools: dict[str, Tool], one: ToolCall, episode: Episode) -> str:
        episode.metrics["tool_calls"] += 1
        try:
            result = await _run(tools, one)
        except _SHOWN_ERRORS as error:
            episode.metrics["tool_errors"] += 1
            result = f"error: {error}" if isinstance(error, ToolError) else f"error: {error!r}"
        if len(result) > self.max_tool_characters:
            return f"{result[: self.max_tool_characters]} (cut: {len(result)} characters)"
        return result


async def _run(tools: dict[str, Tool], one: ToolCall) -> str:
    if not one.name:
        raise ToolError('a call must be a JSON object such as {"name": "...", "arguments": {...}}')
    if one.name not in tools:
        names = nearest(one.name, tools) or sorted(tools)
        raise ToolError(f"there is no tool {one.name!r}; there is {', '.join(names)}")
    tool = tools[one.name]
    arguments: dict[str, Any] = tool.read_arguments(one.arguments)
    result = await call(partial(tool.function, **arguments))
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _as_messages(
    calls: Sequence[ToolCall], results: Sequence[str], *, is_native: bool
) -> list[Message]:
    """Answer native calls with tool messages, tagged ones with one user message of tags."""
    if is_native:
        return [
            Message(role="tool", content=result, tool_call_id=one.id)
            for one, result in zip(calls, results, strict=True)
        ]
    text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [Message(role="user", content=text)]
