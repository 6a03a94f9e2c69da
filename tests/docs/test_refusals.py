"""docs/reference/refusals.md and the messages in the code: each of one is in the other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import telescope_envs

PACKAGE = Path(telescope_envs.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "refusals.md"
FOLDERS = ("install", "publish", "records", "registry", "rules")
ELSEWHERE = {
    # Commands about registries, links, agents and new projects, which neither install nor publish.
    *("publish/scaffold.py", "rules/history.py", "registry/static_view.py", "records/schemas.py"),
    *("install/adapted.py", "install/agents.py", "install/verify.py"),
    *("records/links.py", "records/files.py", "registry/credentials.py"),
}
VARIABLE = "\0"
ERRORS = {
    "RegistryError": "",
    "ConfigError": "",
    "EnvironmentLoadError": "",
    "UnknownNameError": "",
    "LineProblem": f"{VARIABLE}: ",
    "WheelProblem": f"wheel {VARIABLE}: ",
}
"""Name of an error -> what its message begins with when a user sees it."""
ASSEMBLED = {
    "... needs Python ..., but this is Python": "registry/resolving.py",
    "... speaks environment protocol ..., but": "registry/resolving.py",
    "...: requirement ...: ...": "rules/wheel.py",
    "... ended its process while it was loaded": "processes/running.py",
    "... holds ..., which a bundle must not hold": "install/bundle.py",
    "... manifest and files differ": "install/bundle.py",
    "... its lock and its manifest differ": "install/bundle.py",
    "... which its lock does not name": "install/bundle.py",
    "... that its lock does not name, or with other files": "install/bundle.py",
}
"""Row -> the file that puts the message together from parts, before it raises anything."""
MIN_WORDS = 2
"""A message with fewer words of its own passes on what another function or program said."""


def text_of(node: ast.expr) -> str:
    """Return a message as it is written, with a mark for what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return VARIABLE


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of every refusal in the code, and the parts that some consist of."""
    paths = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py"))]
    for path in [*paths, PACKAGE / "processes/uv.py"]:
        name = path.relative_to(PACKAGE).as_posix()
        if name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                start = ERRORS.get(node.func.id, "")
                text = " ".join((start + text_of(node.args[0])).split())
                if node.func.id in ERRORS and len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS:
                    yield f"{name}:{node.lineno}", text


MESSAGES = list(messages())


def rows() -> list[str]:
    """Return the first column of every table of the page, without its quotes."""
    found = re.findall(r"^\| `([^`]+)` \| ", PAGE.read_text(), re.M)
    assert len(found) > 100
    return found


def fits(row: str, message: str) -> bool:
    """Whether the words of `row` are in `message`, in this order and from its beginning."""
    parts = [re.escape(part.strip()) for part in row.split("...") if part.strip()]
    start = "" if row.startswith("...") else "^"
    return bool(parts) and re.search(start + ".*".join(parts), message, re.S) is not None


def fits_any_word(row: str) -> bool:
    """Whether `row` has no words of its own, so it would fit nearly every message."""
    return len(re.findall(r"[A-Za-z]{2,}", row)) < MIN_WORDS


@pytest.mark.parametrize(("place", "message"), MESSAGES)
def test_every_refusal_is_on_the_page(place: str, message: str) -> None:
    fitting = [row for row in rows() if not fits_any_word(row) and fits(row, message)]
    shown = message.replace(VARIABLE, "...")
    assert fitting, f"{place}: add to {PAGE.name}, with cause and remedy: {shown}"


@pytest.mark.parametrize("row", rows())
def test_every_row_of_the_page_is_in_the_code(row: str) -> None:
    if row in ASSEMBLED:
        code = (PACKAGE / ASSEMBLED[row]).read_text()
        is_there = all(part in code for part in (part.strip(" :") for part in row.split("...")))
    else:
        is_there = any(fits(row, text) for _, text in MESSAGES)
    assert is_there, f"no refusal in the code reads {row!r}; remove the row, or correct it"


def test_the_page_explains_each_message_once() -> None:
    assert len(set(rows())) == len(rows())
