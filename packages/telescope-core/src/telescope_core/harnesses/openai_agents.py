"""The harness `openai-agents`: an agent of that library with a shell, in a program of ours."""

import json
from pathlib import Path

from telescope_core.harnesses.command import endpoint_variables
from telescope_core.harnesses.protocol import AGENT_FOLDER, AgentProgram, AgentTask

_PROGRAM = f"{AGENT_FOLDER}/openai_agents_program.py"
_TASK = f"{AGENT_FOLDER}/task.json"
_ANSWER = f"{AGENT_FOLDER}/answer.txt"
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
        """`instructions` are the agent's; `tool_timeout_s` is for one call of the shell."""
        self._instructions = instructions
        self._tool_timeout_s = tool_timeout_s

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the program that builds and runs the agent; the task is in a file."""
        asked = {
            "task": task.text,
            "instructions": self._instructions,
            "model": task.model,
            "max_turns": task.max_turns,
            "tool_timeout_s": self._tool_timeout_s,
            "answer_file": _ANSWER,
        }
        source = Path(__file__).with_name("openai_agents_program.py").read_text(encoding="utf-8")
        return AgentProgram(
            argv=(task.python, "-I", _PROGRAM, _TASK),
            environment={**endpoint_variables(task), "OPENAI_AGENTS_DISABLE_TRACING": "1"},
            files={_PROGRAM: source, _TASK: json.dumps(asked)},
            answer_file=_ANSWER,
        )

    def answer(self, written: str) -> str:
        """Return all of it."""
        return written.strip()
