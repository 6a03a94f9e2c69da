"""The harness `shell-agent`: a shell, a choice of context compaction, and sub-agents."""

from typing import Literal, get_args

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.harnesses.command import OwnProgram

ContextStrategy = Literal["none", "summarize", "drop_tool_results", "sliding_window"]
"""Treatment of a history that is too long: none; replace it by the model's summary; drop the
results of tools except those of the last turns; keep the last turns alone."""

_INSTRUCTIONS = (
    "You work on a computer through the tool `shell`. Files stay between calls, variables do not. "
    "When the task is done, answer without a call of a tool."
)


class ShellAgent(OwnProgram):
    """A small agent with the tool `shell`, whose context and sub-agents are settings."""

    source = "compaction_program.py"
    name = "shell-agent"
    offers_tools = True

    def __init__(
        self,
        *,
        context_strategy: ContextStrategy = "none",
        max_context_tokens: int = 8192,
        keep_turns: int = 2,
        sub_agents: bool = False,
        instructions: str = _INSTRUCTIONS,
        tool_timeout_s: float = 60.0,
    ) -> None:
        """`context_strategy` acts when a request and its answer had over `max_context_tokens`.

        `keep_turns` of the latest turns stay as they are, except with `summarize`. With
        `sub_agents` there is the tool `delegate` too. `instructions` are the system message;
        `tool_timeout_s` is for one call of the shell. Raises ConfigError.
        """
        if context_strategy not in get_args(ContextStrategy):
            raise unknown_name("context_strategy", context_strategy, get_args(ContextStrategy))
        # Options come from a settings file as they are written there.
        counts: dict[str, object] = {
            "max_context_tokens": max_context_tokens,
            "keep_turns": keep_turns,
        }
        for option, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"harness {self.name!r}: {option} must be a whole number of at least 1, "
                    f"got {value!r}"
                )
        super().__init__(
            {
                "context_strategy": context_strategy,
                "max_context_tokens": max_context_tokens,
                "keep_turns": keep_turns,
                "sub_agents": sub_agents,
                "instructions": instructions,
                "tool_timeout_s": tool_timeout_s,
            }
        )
