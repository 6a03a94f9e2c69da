"""The repositories: their files, the issue, the fix, and hidden checks with what they return.

Each is one text file in `tasks/`. It has a section for each file, for each place to fix (`fix` and
`by`), for the hidden checks and for the values that they must return. Pure.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from telescope_core import Split

TESTS = "tests/"
"""Folder of the tests that a policy sees and must leave as they are."""
_SECTION = re.compile(r"^== (file|fix|by|hidden|expected)(?: (\S+))?\n", re.MULTILINE)
_RUN = """

def run_check(name):
    try:
        return globals()[name]()
    except Exception as error:
        return {"raised": type(error).__name__}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A text to replace in a file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One small repository with a planted bug."""

    name: str
    split: Split
    issue: str
    files: Mapping[str, str]
    """Path and content of each file, with the bug."""
    fix: Sequence[Edit]
    hidden: str
    """Functions that call the repository; they say nothing of what is right."""
    expected: Mapping[str, object]
    """What each of them must return. It never enters a sandbox."""

    @property
    def program(self) -> str:
        """The hidden checks with a function `run_check` that calls one by its name."""
        return self.hidden + _RUN

    @property
    def tests(self) -> Mapping[str, str]:
        """The files of tests, which must not change."""
        return {path: text for path, text in self.files.items() if path.startswith(TESTS)}


@cache
def tasks() -> Mapping[str, Task]:
    """Return all repositories by name, in the order of their names."""
    folder = files("telescope_env_telescope_swe_small").joinpath("tasks")
    found = sorted((one.name, one.read_text()) for one in folder.iterdir())
    return {
        name.removesuffix(".txt"): read_task(name.removesuffix(".txt"), text)
        for name, text in found
    }


def read_task(name: str, text: str) -> Task:
    """Return the repository that a text file describes."""
    head, *rest = _SECTION.split(text)
    sections = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
    about = dict(line.split(": ", 1) for line in head.splitlines())
    news = [body.removesuffix("\n") for kind, _, body in sections if kind == "by"]
    olds = [(path, body.removesuffix("\n")) for kind, path, body in sections if kind == "fix"]
    (hidden,) = (body for kind, _, body in sections if kind == "hidden")
    (expected,) = (body for kind, _, body in sections if kind == "expected")
    rows = (line.split(": ", 1) for line in expected.splitlines())
    return Task(
        name=name,
        split=Split(about["split"]),
        issue=about["issue"],
        files={path: body for kind, path, body in sections if kind == "file"},
        fix=[
            Edit(path=path, old=old, new=new) for (path, old), new in zip(olds, news, strict=True)
        ],
        hidden=hidden,
        expected={check: ast.literal_eval(value) for check, value in rows},
    )
