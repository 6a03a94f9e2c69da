"""The program of the harness `openai-agents`, run inside the sandbox: an agent with a shell.

It runs in the virtual environment of that library, which has nothing of Telescope.
"""

# pyright: basic, reportMissingImports=false
# The library is not installed where this is checked.
import asyncio
import json
import subprocess
import sys
from pathlib import Path

from agents import (
    Agent,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


def shown(done):
    """Return the text about a command for the model."""
    ended = f"\n[exit code {done.returncode}]" if done.returncode else ""
    return f"{done.stdout[-10_000:]}{ended}".strip() or "[no output]"


async def answer_of(asked):
    """Build the agent, run it, and return its answer; None if it runs out of turns."""

    @function_tool
    async def shell(command: str) -> str:
        """Run a command with bash and return what it prints.

        Args:
            command: The command, or several lines of them.
        """
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=asked["tool_timeout_s"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"[stopped after {asked['tool_timeout_s']:g} s]"
        return shown(done)

    set_tracing_disabled(True)
    async with AsyncOpenAI() as client:
        agent = Agent(
            name="agent",
            instructions=asked["instructions"],
            model=OpenAIChatCompletionsModel(model=asked["model"], openai_client=client),
            tools=[shell],
        )
        try:
            ended = await Runner.run(agent, asked["task"], max_turns=asked["max_turns"])
        except MaxTurnsExceeded:
            return None
    return str(ended.final_output)


def main(path):
    """Carry out the task in the file at `path`, and write the answer to the file named there."""
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    answer = asyncio.run(answer_of(asked))
    if answer is None:
        sys.exit(asked["max_turns_exit_code"])
    Path(asked["answer_file"]).write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
