"""`HumanEval`: a function to complete, and the problem's own test on what it returns."""

import asyncio
from functools import cached_property
from typing import Any

from telescope_core import (
    Episode,
    Example,
    ExampleSource,
    ListSource,
    Rollout,
    Split,
    metric,
    reward,
)
from telescope_core.sandboxes import ProgramConfig, ProgramEnvironment, Returned, call_function
from telescope_env_telescope_humaneval.checking import calls_of, passes
from telescope_env_telescope_humaneval.problems import Problem, problems, program_of

INSTRUCTION = "Complete this Python function. Reply with the whole function in one code block."


class HumanEval(ProgramEnvironment):
    """The 164 problems of HumanEval: Python functions to complete from their docstrings."""

    class Config(ProgramConfig):
        """How the problems are asked, and where programs run."""

        instruction: str = INSTRUCTION
        """Stands before the function, which is then in a code block; empty asks with nothing but
        the beginning of the function, for models that go on with a text."""

    config: Config

    @cached_property
    def _problems(self) -> dict[str, Problem]:
        return {problem.id: problem for problem in problems()}

    def splits(self) -> tuple[Split, ...]:
        """Return the eval split: there is nothing to train on."""
        return (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return the problems in their order."""
        return ListSource([Example(id=one.id, prompt=self._asked(one)) for one in problems()])

    def _asked(self, problem: Problem) -> str:
        if not self.config.instruction:
            return problem.prompt
        return f"{self.config.instruction}\n\n```python\n{problem.prompt.strip()}\n```"

    def gold_answer(self, example: Example) -> str | None:
        """Return the whole function."""
        problem = self._problems[example.id]
        return f"```python\n{problem.prompt}{problem.solution}\n```"

    @reward
    async def passed(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """1 when the problem's test accepts what the function returns."""
        problem = self._problems[example.id]
        program = program_of(problem, rollout.completion_text)
        calls = await asyncio.to_thread(calls_of, problem)
        async with self.sandbox() as sandbox:
            returned = await call_function(
                sandbox, program, problem.function, calls, timeout_s=self.config.test_timeout_s
            )
        episode.state["returned"] = returned
        if returned.reason:
            episode.note("failure", returned.reason, kind="stderr")
            return 0.0
        return float(await asyncio.to_thread(passes, problem, returned.values))

    @metric
    def returns(self, episode: Episode[Any]) -> float:
        """1 when the function returned a plain value for every call, right or wrong."""
        returned = episode.state.get("returned")
        return float(isinstance(returned, Returned) and not returned.reason)
