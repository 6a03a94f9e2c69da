"""A file of numbers, and an agent that looks at it with a shell in a sandbox.

`python examples/agent.py runs/agent-demonstrations.jsonl` writes what the agent first imitates;
with `summarize` at the end, it writes a summary of its work before it answers.
docs/tutorials/agent.md tells the rest.
"""

import json
import sys
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from pydantic import Field

from telescope_core import Example, Split, reward, setup
from telescope_core.harnesses import AgentConfig, AgentEnvironment
from telescope_core.harnesses.compaction_program import SHELL, SUMMARIZE, with_summary

INSTRUCTIONS = "Use the shell."
QUESTIONS = {
    "Count the numbers in the file.": (len, "wc -l < {}"),
    "Add the numbers in the file.": (sum, "echo $(($(paste -sd+ {})))"),
    "Largest number in the file?": (max, "sort -n {} | tail -1"),
    "Smallest number in the file?": (min, "sort -n {} | head -1"),
}
"""Question -> what it asks for, and the command that tells."""
RIGHT_ON_PURPOSE = 0.2
NUM_DEMONSTRATIONS = 8000


class Numbers(AgentEnvironment):
    """Neither the name of the file nor the numbers in it are in the prompt."""

    harness = "shell-agent"

    class Config(AgentConfig):
        harness_options: dict[str, Any] = Field(default={"instructions": INSTRUCTIONS})
        max_turns: int = Field(default=5, ge=1)

    def draw(self, random):
        question = random.choice(list(QUESTIONS))
        name = "".join(random.choices(ascii_lowercase, k=3))
        numbers = [random.randint(1, 99) for _ in range(random.randint(3, 6))]
        compute, _ = QUESTIONS[question]
        return Example(
            id=f"{question} {name}: {numbers}",
            prompt=question,
            answer=str(compute(numbers)),
            info={"file": name, "numbers": numbers},
        )

    @setup
    async def put_file(self, episode):
        box, info = await self.sandbox(episode), episode.example.info
        await box.write(info["file"], "".join(f"{n}\n" for n in info["numbers"]).encode())

    @reward
    def correct(self, completion, answer):
        return completion.strip() == answer


def demonstration(example: Example, random: Random) -> dict[str, Any]:
    """Return a conversation whose calls are well written, but often not the right ones.

    One command in five answers the question on purpose; the others are drawn at random.
    """
    on_purpose = random.random() < RIGHT_ON_PURPOSE
    compute, command = QUESTIONS[example.prompt if on_purpose else random.choice(list(QUESTIONS))]
    name, found = example.info["file"], str(compute(example.info["numbers"]))
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": example.prompt},
        *called("ls", name),
        *called(command.format(name), found),
        {"role": "assistant", "content": found},
    ]
    return {"messages": messages, "tools": [SHELL]}


def called(command: str, result: str) -> list[dict[str, Any]]:
    """Return a call of the shell and its result."""
    function = {"name": "shell", "arguments": json.dumps({"command": command})}
    call = {"id": command, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": command},
    ]


def summarized(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a demonstration in two contexts: up to a summary, which is the result, and from it."""
    *work, answer = row["messages"]
    contexts = (
        [*work, {"role": "user", "content": SUMMARIZE}],
        with_summary(work, answer["content"]),
    )
    return [{**row, "messages": [*messages, answer]} for messages in contexts]


def main(path: Path, *, summarizes: bool) -> None:
    """Write demonstrations over examples of the train split."""
    source, random = Numbers().examples(Split.TRAIN), Random(0)
    rows = [demonstration(source.example(n), random) for n in range(NUM_DEMONSTRATIONS)]
    if summarizes:
        rows = [context for row in rows for context in summarized(row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"wrote {len(rows)} demonstrations to {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), summarizes="summarize" in sys.argv[2:])
