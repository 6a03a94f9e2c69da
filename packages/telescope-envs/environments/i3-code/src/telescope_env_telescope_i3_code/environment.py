"""`I3Code`: one problem, one program, and hidden tests that a sandbox never holds."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Rollout,
    Split,
    metric,
    reward,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec
from telescope_core.parsers import code_block
from telescope_core.sandboxes import Grade, ProgramConfig, ProgramEnvironment, grade_program
from telescope_env_telescope_i3_code.rows import example_of
from telescope_env_telescope_i3_code.tests import (
    Cases,
    call_test,
    called_name,
    cases_of,
    chosen,
    stdin_test,
)

DATASET = "PrimeIntellect/INTELLECT-3-RL"
SUBSET = "code"
REVISION = "a9eb9183224cec63fe9a71e7a3a80cff14868624"
_STDIN = (
    "Write a Python program that reads standard input and writes the answer to standard output."
)
_FUNCTION = "Write the Python function or method `{name}`."
_REPLY = "Reply with the whole program in one ```python code block."
_PRELUDE = """
from typing import *; from random import *; from string import *; from re import *
from statistics import *; from datetime import *; from collections import *; from itertools import *
from functools import *; from operator import *; from heapq import *; from bisect import *
from copy import *; from math import *; from json import *; from builtins import *
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator
import random, re, statistics, string, sys, time
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""
"""What sites with functions to write import beforehand, so that starter code is valid.

The later one of two equal names counts: Counter is not the one of typing, pow and compile are the
built-in ones, and the name of a module is the module.
"""
_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.MULTILINE)


def with_prelude(program: str) -> str:
    """Return `program` with what sites import, after its own imports from `__future__`."""
    ends = [found.end() for found in _FUTURE.finditer(program)]
    if not ends and "__future__" in program:
        return program
    end = ends[-1] if ends else 0
    return f"{program[:end]}{_PRELUDE}{program[end:]}"


class I3Code(ProgramEnvironment):
    """Programming problems; a program or a function is graded by hidden tests."""

    class Config(ProgramConfig):
        """Which problems are asked, how they are graded, and where programs run."""

        score: Literal["all", "share"] = "all"
        """all: 1 if every test passes; share: the part of the tests that do."""
        max_tests: Annotated[int, Field(ge=0)] = 15
        """Most tests of a problem that are run, evenly spread over them; 0 runs all."""
        tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-6
        """Numbers that are not whole may differ by this, absolute or relative, as the sites that
        problems are from allow; 0 compares them exactly."""
        instruction: bool = True
        """Whether what to write, and how to reply, follows the problem."""
        path: str = DATASET
        """A dataset on the Hub, a local folder, or a file with columns like these."""
        subset: str = ""
        """Configuration of the dataset; empty = `code` of INTELLECT-3-RL, and the default one of
        others."""
        revision: str = ""
        """Commit, tag or branch; empty = the pinned commit. Needed with another dataset of the
        Hub."""
        train_split: str = "train"
        """Split to train on; empty = the problems are for evals only."""
        eval_split: str = ""
        """Split for evals; empty = a hash of each problem holds a tenth of `train_split` out."""
        data_folder: str = ""
        """Where downloads are kept; empty = the library's own cache."""

        @model_validator(mode="after")
        def _is_known(self) -> Self:
            is_ours = self.path == DATASET or DatasetSpec(path=self.path).local is not None
            if not is_ours and not self.revision:
                raise ValueError(
                    f"path {self.path!r} is no local folder or file; to read it from the Hub set "
                    "env.revision to a commit of it"
                )
            if not self.train_split and not self.eval_split:
                raise ValueError("expected train_split or eval_split, or both; got neither")
            return self

        def dataset_spec(self) -> DatasetSpec:
            """Return the table to read."""
            is_ours = self.path == DATASET
            return DatasetSpec(
                path=self.path,
                revision=self.revision or (REVISION if is_ours else ""),
                subset=self.subset or (SUBSET if is_ours else ""),
                train_split=self.train_split,
                eval_split=self.eval_split or self.train_split,
                cache_dir=self.data_folder,
            )

    config: Config
    network = "load"

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        if Path(self.config.path).expanduser().exists():
            self.network = "none"

    def splits(self) -> tuple[Split, ...]:
        """Return both splits, or the eval split alone if there is none to train on."""
        return (Split.TRAIN, Split.EVAL) if self.config.train_split else (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return the problems of one split."""
        spec = self.config.dataset_spec()
        return DatasetSource(spec, split, make=partial(example_of, path=spec.path))

    def dataset_revisions(self) -> dict[str, str]:
        """Return the dataset's commit; empty if it is read from this machine."""
        return self.config.dataset_spec().revisions()

    def format_prompt(self, example: Example) -> str:
        """Return the problem, its starter code if it has any, and what to write."""
        parts = [str(example.prompt)]
        starter = str(example.info.get("starter_code", "")).strip()
        if starter:
            parts.append(f"Begin with this code:\n```python\n{starter}\n```")
        if self.config.instruction:
            function = cases_of(example).function
            what = _FUNCTION.format(name=function) if function else _STDIN
            parts.append(f"{what} {_REPLY}")
        return "\n\n".join(parts)

    def gold_answer(self, example: Example) -> str | None:
        """Return the row's own solution, if it has one."""
        gold = example.info.get("gold")
        return f"```python\n{gold}\n```" if gold else None

    @reward
    async def passed(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """Whether all tests pass, or the part of them that do, as `score` says."""
        program = code_block(rollout.completion_text)
        cases = await asyncio.to_thread(cases_of, example)
        if program is None or not program.strip():
            return 0.0
        grade = await self._grade(program, cases)
        episode.state["grade"] = grade
        failed = next((one.reason for one in grade.outcomes if not one.passed), "")
        if failed:
            episode.note("failure", failed, kind="stderr")
        return float(grade.passed) if self.config.score == "all" else grade.fraction

    async def _grade(self, program: str, cases: Cases) -> Grade:
        config = self.config
        some = chosen(cases.cases, config.max_tests)
        if cases.function:
            name = called_name(cases.function, program)
            tests = [call_test(one, name) for one in some]
            program = with_prelude(program)
        else:
            tests = [stdin_test(one) for one in some]
        async with self.sandbox() as sandbox:
            return await grade_program(
                sandbox,
                program,
                tests,
                timeout_s=config.test_timeout_s,
                tolerance=config.tolerance,
                stop_at_failure=config.score == "all",
            )

    @metric
    def has_program(self, rollout: Rollout) -> float:
        """1 when the reply holds a code block."""
        return float(bool((code_block(rollout.completion_text) or "").strip()))

    @metric
    def share_passed(self, episode: Episode[Any]) -> float:
        """The part of the tests that passed; with `score` all, none is run after a failure."""
        grade = episode.state.get("grade")
        return grade.fraction if isinstance(grade, Grade) else 0.0
