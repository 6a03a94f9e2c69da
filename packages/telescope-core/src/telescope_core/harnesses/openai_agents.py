"""The harness `openai-agents`: an agent of that library with a shell, run by our own program."""

from dataclasses import replace

from telescope_core.harnesses.command import own_program
from telescope_core.harnesses.protocol import AgentProgram, AgentTask

_INSTRUCTIONS = (
    "You work on a computer through the tool `shell`. Files stay between calls, variables do not. "
    "When the task is done, answer without a call of a tool."
)


class OpenAIAgents:
    """An agent of the OpenAI Agents SDK with the tool `shell`."""

    name = "openai-agents"
    requirements = ("openai-agents==0.24.0", "openai==3.54.0")
    offers_tools = True

    def __init__(self, *, instructions: str = _INSTRUCTIONS, tool_timeout_s: float = 60.0) -> None:
        """`instructions`: those of the agent; `tool_timeout_s`: limit of one shell call."""
        self._options = {"instructions": instructions, "tool_timeout_s": tool_timeout_s}

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the program that builds and runs the agent; a file passes it the task."""
        own = own_program(task, "openai_agents_program.py", self._options)
        return replace(own, environment={**own.environment, "OPENAI_AGENTS_DISABLE_TRACING": "1"})

    def answer(self, written: str) -> str:
        """Return the whole output as the answer."""
        return written.strip()
