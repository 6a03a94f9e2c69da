"""`PythonTool`: a number that takes a loop to work out, and a Python tool in a sandbox."""

import asyncio
import random
import re
import threading
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Rollout,
    Split,
    SplitSource,
    ToolConfig,
    ToolEnvironment,
    cleanup,
    reward,
    tool,
)
from telescope_core.parsers import xml_tag
from telescope_core.sandboxes import EpisodeSandboxes
from telescope_env_telescope_python_tool.problems import draw_problem

INSTRUCTION = (
    "Use Python to work it out. When you know the number, write nothing but the number between "
    "<answer> and </answer>."
)
_NUMBER = re.compile(r"-?[0-9]{1,40}")


class PythonTool(ToolEnvironment):
    """Work out numbers with Python in a sandbox."""

    class Config(ToolConfig):
        """Which problems are drawn, and where programs run."""

        size: Annotated[int, Field(ge=100, le=100_000)] = 5000
        """About how many steps a loop takes."""
        sandbox: str = "local"
        """Name of the provider of sandboxes."""
        max_sandboxes: Annotated[int, Field(ge=1, le=1000)] = 16
        """Most sandboxes that are open at the same time; further rollouts wait."""
        program_timeout_s: Annotated[float, Field(gt=0)] = 10.0
        """Most seconds for one program; must be below `tool_timeout_s`."""
        instruction: str = INSTRUCTION
        """Follows the problem."""
        seed: int = 0

        @model_validator(mode="after")
        def _program_ends_first(self) -> Self:
            if self.program_timeout_s >= self.tool_timeout_s:
                raise ValueError(
                    "program_timeout_s must be below tool_timeout_s, got "
                    f"{self.program_timeout_s:g} and {self.tool_timeout_s:g}"
                )
            return self

    config: Config

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._sandboxes: EpisodeSandboxes | None = None
        self._opening = threading.Lock()

    @tool
    async def python(self, code: str, episode: Episode[Any]) -> str:
        """Run a Python program and return what it prints. Files stay; variables do not.

        Args:
            code: The program. Print what you want to see.
            episode: The rollout, which has a sandbox of its own.
        """
        if self._sandboxes is None:
            await asyncio.to_thread(self._open_once)
        assert self._sandboxes is not None, "it was opened"
        return await self._sandboxes.python(code, episode)

    def _open_once(self) -> None:
        """Open the provider, which looks at what the machine can do: not before it is needed."""
        with self._opening:
            if self._sandboxes is None:
                self._sandboxes = EpisodeSandboxes(
                    self.config.sandbox,
                    max_open=self.config.max_sandboxes,
                    timeout_s=self.config.program_timeout_s,
                )
                self.on_close(self._sandboxes.close)

    @cleanup
    async def release(self, episode: Episode[Any]) -> None:
        """Close the rollout's sandbox, if it has one."""
        if self._sandboxes is not None:
            await self._sandboxes.release(episode)

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct problems; a hash of the problem decides its split."""
        return SplitSource(self._draw, split=split, seed=f"python-tool/{self.config.seed}")

    def _draw(self, rng: random.Random) -> Example:
        text, answer = draw_problem(rng, self.config.size)
        if str(answer) in _NUMBER.findall(text):
            return self._draw(rng)  # a number of the question must not be the answer
        return Example(id=text, prompt=f"{text} {self.config.instruction}", answer=str(answer))

    def gold_answer(self, example: Example) -> str:
        """Return the number."""
        return f"<answer>{example.answer}</answer>"

    @reward
    def correct(self, rollout: Rollout, example: Example) -> float:
        """1 when the last number in tags is the right one."""
        said = xml_tag(rollout.completion_text, "answer") or ""
        plain = said.replace(",", "").strip() if len(said) < 100 else ""
        return float(_NUMBER.fullmatch(plain) is not None and int(plain) == int(example.answer))
