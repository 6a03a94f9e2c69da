"""What Python has on Linux and lacks on macOS, as typeshed says it, and processes without it."""

import ast
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

MODULES = ("fcntl", "mmap", "os", "resource", "signal", "socket", "time")
KEPT = {"socket.AF_PACKET"}
"""What libraries read at their import on Linux."""


@cache
def linux_only() -> frozenset[str]:
    """Return names, such as os.pipe2, that modules of the standard library have on Linux alone."""
    return frozenset(
        f"{module}.{name}"
        for module in MODULES
        for name in _names(module, "linux") - _names(module, "darwin")
    )


def like_macos(folder: Path) -> dict[str, str]:
    """Return the variables with which a process finds little more than it would on macOS.

    `folder` is made; what such processes import at their start is written to it.
    """
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "like_macos/sitecustomize.py", folder)
    (folder / "names.txt").write_text("\n".join(sorted(linux_only() - KEPT)))
    return {"PYTHONPATH": str(folder)}


def _names(module: str, platform: str) -> set[str]:
    spec = find_spec("basedpyright")
    assert spec is not None
    assert spec.origin is not None
    stubs = Path(spec.origin).parent / "dist/typeshed-fallback/stdlib"
    path = stubs / f"{module}.pyi"
    path = path if path.exists() else stubs / module / "__init__.pyi"
    return set(_defined(ast.parse(path.read_text(encoding="utf-8")).body, platform))


def _defined(body: list[ast.stmt], platform: str) -> Iterator[str]:
    """Yield the names that statements of a stub define on `platform`."""
    for statement in body:
        if isinstance(statement, ast.If):
            system = SimpleNamespace(platform=platform, version_info=sys.version_info)
            test = compile(ast.Expression(statement.test), "stub", "eval")
            holds = eval(test, {"sys": system})
            yield from _defined(statement.body if holds else statement.orelse, platform)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.ImportFrom):
            yield from (one.asname for one in statement.names if one.asname)
