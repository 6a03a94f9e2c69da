"""`SweSmall`: an issue, a repository in a sandbox, and hidden checks after the last turn."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    ListSource,
    Split,
    ToolConfig,
    ToolEnvironment,
    ToolError,
    cleanup,
    metric,
    reward,
    tool,
)
from telescope_core.sandboxes import (
    EpisodeSandboxes,
    Sandbox,
    SandboxFileError,
    SandboxSpec,
    call_function,
)
from telescope_env_telescope_swe_small.tasks import tasks

INSTRUCTION = (
    "The repository is in the current folder. Find the cause and mend it with the tools; "
    "`python3 -m unittest` runs the tests. Do not change the files in tests/, which must go on to "
    "pass. Other tests will be run when you are done. Then say in a sentence what you changed."
)
_MAX_FILE = 200_000
_TEST = """#!/bin/bash
mkdir -p /logs/verifier
PYTHONPATH=. python3 /tests/hidden.py > /tmp/returned
python3 -I /tests/check.py > /logs/verifier/reward.txt
"""
"""What a task folder runs: the checks, and then a process of its own that compares."""
_PRINTS = """

if __name__ == "__main__":
    found = {name: run_check(name) for name in list(globals()) if name.startswith("check_")}
    print(repr(found))
"""
_CHECK = """import ast, pathlib

expected = {expected!r}
tests = {tests!r}
try:
    found = ast.literal_eval(pathlib.Path("/tmp/returned").read_text().splitlines()[-1])
    is_right = found == expected
    is_right &= all(pathlib.Path(path).read_text() == text for path, text in tests.items())
except (OSError, ValueError, IndexError, SyntaxError):
    is_right = False
print(int(is_right))
"""
_MEND = """import pathlib

for path, old, new in {edits!r}:
    file = pathlib.Path(path)
    file.write_text(file.read_text().replace(old, new, 1))
"""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one rollout did so far."""

    sandbox: Sandbox | None = None
    """The sandbox that holds the repository; None before the first tool call."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_right: int = 0
    """How many hidden checks returned what they should."""
    changed_tests: bool = False


class SweSmall(ToolEnvironment):
    """Find and fix the bug in a tiny repository."""

    class Config(ToolConfig):
        """Where the repository is, and how the issue is asked."""

        sandbox: str = "local"
        """Name of the provider of sandboxes."""
        max_sandboxes: Annotated[int, Field(ge=1, le=1000)] = 16
        """Most sandboxes that are open at the same time; further rollouts wait."""
        memory_mb: Annotated[int, Field(ge=0)] = 512
        """Most memory of the programs of a rollout, MiB; 0 leaves it to the provider."""
        command_timeout_s: Annotated[float, Field(gt=0)] = 20.0
        """Most seconds for one command, and for the hidden checks; must be below
        `tool_timeout_s`."""
        instruction: str = INSTRUCTION
        """Follows the issue."""

        @model_validator(mode="after")
        def _command_ends_first(self) -> Self:
            if self.command_timeout_s >= self.tool_timeout_s:
                raise ValueError(
                    "command_timeout_s must be below tool_timeout_s, got "
                    f"{self.command_timeout_s:g} and {self.tool_timeout_s:g}"
                )
            return self

    config: Config
    State = Work
    max_turns = 20

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._sandboxes = EpisodeSandboxes(
            self.config.sandbox,
            SandboxSpec(memory_mb=self.config.memory_mb or None),
            max_open=self.config.max_sandboxes,
            timeout_s=self.config.command_timeout_s,
        )
        self.on_close(self._sandboxes.close)

    def examples(self, split: Split) -> ExampleSource:
        """Return the repositories of one split."""
        return ListSource(
            [
                Example(id=one.name, prompt=f"{one.issue}\n\n{self.config.instruction}")
                for one in tasks().values()
                if one.split is split
            ]
        )

    @tool
    async def bash(self, command: str, episode: Episode[Work]) -> str:
        """Run a bash command in the folder of the repository and return what it prints.

        Args:
            command: The command, or several lines of them.
            episode: The rollout, which has a sandbox of its own.
        """
        await self._opened(episode)
        return await self._sandboxes.bash(command, episode)

    @tool
    async def edit(self, path: str, old: str, new: str, episode: Episode[Work]) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: The file, seen from the folder of the repository.
            old: The text to replace, with its spaces and ends of lines; empty makes a new file.
            new: The text to put in its place.
            episode: The rollout, which has a sandbox of its own.
        """
        sandbox = await self._opened(episode)
        try:
            content = (await sandbox.read(path)).decode() if old else ""
        except SandboxFileError as error:
            raise ToolError(f"{path[:200]} cannot be read: {error}") from None
        except UnicodeDecodeError:
            raise ToolError(f"{path[:200]} is no text") from None
        num_found = content.count(old) if old else 1
        if num_found != 1:
            raise ToolError(
                f"the text to replace must occur once in {path[:200]}, and it occurs {num_found} "
                "times; give more or other lines of the file"
            )
        changed = content.replace(old, new) if old else new
        if len(changed) > _MAX_FILE:
            raise ToolError(f"a file may have {_MAX_FILE} characters; this would have more")
        try:
            await sandbox.write(path, changed.encode())
        except SandboxFileError as error:
            raise ToolError(f"{path[:200]} cannot be written: {error}") from None
        except UnicodeEncodeError:
            raise ToolError("the new text holds characters that are no Unicode text") from None
        return f"{path} was changed"

    async def _opened(self, episode: Episode[Work]) -> Sandbox:
        """Return the sandbox of the rollout with the repository in it, made when it has none.

        A sandbox that the policy's own commands brought to its end is replaced by a new one, in
        which the repository is as it was at first.
        """
        work = episode.state
        async with work.lock:
            sandbox = await self._sandboxes.sandbox(episode)
            if sandbox is not work.sandbox:
                for path, text in tasks()[episode.example.id].files.items():
                    await sandbox.write(path, text.encode())
                work.sandbox = sandbox
            return sandbox

    @cleanup
    async def release(self, episode: Episode[Work]) -> None:
        """Close the rollout's sandbox, if it has one."""
        await self._sandboxes.release(episode)

    def gold_answer(self, example: Example) -> Sequence[str]:
        """Return a look at the file, the edits that mend it, and a last sentence."""
        task = tasks()[example.id]
        look = _call("bash", command=f"cat {task.fix[0].path}")
        edits = [_call("edit", path=one.path, old=one.old, new=one.new) for one in task.fix]
        return [look, *edits, "It is mended."]

    def task_files(self, example: Example) -> Mapping[str, str]:
        """Return the repository, its hidden checks and its fix as a task folder."""
        task = tasks()[example.id]
        edits = [(one.path, one.old, one.new) for one in task.fix]
        return {
            "instruction.md": f"{example.prompt}\n",
            **{f"environment/{path}": text for path, text in task.files.items()},
            "tests/test.sh": _TEST,
            "tests/hidden.py": task.program + _PRINTS,
            "tests/check.py": _CHECK.format(expected=dict(task.expected), tests=dict(task.tests)),
            "solution/solve.sh": "python3 /solution/mend.py\n",
            "solution/mend.py": _MEND.format(edits=edits),
        }

    @reward
    async def fixed(self, episode: Episode[Work]) -> float:
        """1 when all hidden checks return what they should, and the tests are as they were."""
        work, task = episode.state, tasks()[episode.example.id]
        if work.sandbox is None or not work.sandbox.is_alive:
            return 0.0
        work.changed_tests = not await _holds(work.sandbox, task.tests)
        returned = await call_function(
            work.sandbox,
            task.program,
            "run_check",
            [(name,) for name in task.expected],
            timeout_s=self.config.command_timeout_s,
        )
        if returned.reason:
            episode.note("checks", returned.reason, kind="stderr")
            return 0.0
        pairs = zip(returned.values, task.expected.values(), strict=True)
        work.num_right = sum(value == right for value, right in pairs)
        return float(work.num_right == len(task.expected) and not work.changed_tests)

    @metric
    def share_right(self, episode: Episode[Work]) -> float:
        """The part of the hidden checks that return what they should."""
        return episode.state.num_right / len(tasks()[episode.example.id].expected)

    @metric(lower_is_better=True)
    def changed_tests(self, episode: Episode[Work]) -> float:
        """1 when a file in tests/ was changed or deleted."""
        return float(episode.state.changed_tests)


async def _holds(sandbox: Sandbox, files: Mapping[str, str]) -> bool:
    """Return whether all files are in the sandbox as they were; others may be beside them."""
    try:
        found = [await sandbox.read(path) for path in files]
    except SandboxFileError:
        return False
    return found == [text.encode() for text in files.values()]


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
