"""The harness `openai-agents`: an agent of that library with a shell, run by our own program."""

from dataclasses import replace

from telescope_core.harnesses.command import OwnProgram
from telescope_core.harnesses.protocol import AgentProgram, AgentTask

_INSTRUCTIONS = (
    "You work on a computer through the tool `shell`. Files stay between calls, variables do not. "
    "When the task is done, answer without a call of a tool."
)


class OpenAIAgents(OwnProgram):
    """An agent of the OpenAI Agents SDK with the tool `shell`."""

    source = "openai_agents_program.py"
    name = "openai-agents"
    requirements = ("openai-agents==0.24.0", "openai==3.54.0")
    offers_tools = True

    def __init__(self, *, instructions: str = _INSTRUCTIONS, tool_timeout_s: float = 60.0) -> None:
        """`instructions`: those of the agent; `tool_timeout_s`: limit of one shell call."""
        super().__init__({"instructions": instructions, "tool_timeout_s": tool_timeout_s})

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the program that builds and runs the agent; a file passes it the task."""
        own = super().program(task)
        return replace(own, environment={**own.environment, "OPENAI_AGENTS_DISABLE_TRACING": "1"})
