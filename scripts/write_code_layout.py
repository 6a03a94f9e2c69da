"""Draws the packages in docs/explanation/how-the-code-is-laid-out.md: run it after a change.

A drawing has the floors of a package as its import contract in `pyproject.toml` has them, and of
each room the first sentence of its docstring. The rest of the page is written by hand.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "explanation" / "how-the-code-is-laid-out.md"
WITHOUT_FLOORS = ("telescope_adapters", "telescope_cli")
"""Packages without a contract of their own: everything in them stands side by side."""
WIDTH = 100


def reference() -> str:
    """Return the page with every drawing as the code is now."""
    drawings = {package: "\n".join(drawing(package, rows)) for package, rows in floors().items()}
    return re.sub(
        r"<!-- drawing of (\w+) -->\n```text\n.*?```",
        lambda found: f"<!-- drawing of {found[1]} -->\n```text\n{drawings[found[1]]}\n```",
        TARGET.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def floors() -> dict[str, list[list[str]]]:
    """Return package -> its floors from the top down, each with the rooms on it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        contract["containers"][0]: [re.split(r" *[|:] *", layer) for layer in contract["layers"]]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" in contract
    }
    for package in WITHOUT_FLOORS:
        sources = sorted(folder_of(package).iterdir())
        rooms = [
            one.stem for one in sources if one.suffix == ".py" or (one / "__init__.py").exists()
        ]
        found[package] = [[room for room in rooms if not room.startswith("_")]]
    return found


def folder_of(package: str) -> Path:
    """Return the folder with the sources of a package."""
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def drawing(package: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of one drawing: floors with a line between them, the highest first."""
    width = max(len(room) for rooms in rows for room in rooms)
    for number, rooms in enumerate(rows):
        if number:
            yield f"    {'-' * (WIDTH - 4)}"
        for place, room in enumerate(rooms):
            floor = "" if place or len(rows) == 1 else str(len(rows) - number)
            first, *rest = textwrap.wrap(about(package, room), WIDTH - width - 6)
            yield f"{floor:>2}  {room:<{width}}  {first}"
            yield from (f"{'':{width + 6}}{line}" for line in rest)


def about(package: str, room: str) -> str:
    """Return the first sentence of the docstring of a room."""
    path = folder_of(package) / room
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    assert docstring, f"{source} needs a docstring, which says what it is"
    return re.split(r"(?<=\.)\s", docstring)[0].replace("\n", " ")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
