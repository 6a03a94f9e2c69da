"""Names that locate the code of an environment: `module:Class`, `file.py:Class`, a folder."""

import ast
import os
from pathlib import Path

from telescope_core.base.errors import EnvironmentLoadError, nearest
from telescope_core.base.protocols import EnvironmentLocation
from telescope_core.finding.schemes import adapted


def names_class(name: str) -> bool:
    """Return whether `name` is `module:Class` or `file.py:Class`, which this Python imports.

    `corp:toy` is a registry and an environment's name, and `gym:FrozenLake-v1` an environment of
    another framework.
    """
    if adapted(name) is not None:
        return False
    attribute = name.partition(":")[2]
    is_module = bool(attribute) and not set("/@") & set(name) and not attribute.islower()
    return is_module or names_file(name)


def names_file(name: str) -> bool:
    """Return whether `name` is a Python file, with or without a class."""
    return name.partition(":")[0].endswith(".py")


def names_folder(name: str) -> bool:
    """Return whether `name` is the folder of a project, such as `.` or `./maze`."""
    return not names_file(name) and (name in (".", "..", "~") or name.startswith(_PATHS))


_PATHS = ("./", "../", "/", "~/")


def location_of_file(name: str) -> EnvironmentLocation:
    """Return the location of the class of `file.py:Class`; the folder may be local to this machine.

    Raises EnvironmentLoadError that says which classes the file has, if it names none of them.
    """
    given, _, class_name = name.partition(":")
    path = Path(given).expanduser()
    if not path.is_file():
        beside = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise EnvironmentLoadError(
            f"{name}: expected file.py:Class, but there is no file {path} in {Path.cwd()}"
            f"{_meant(str(path), beside)}"
        )
    bound = _bound_names_of(path)
    # Whether an imported or assigned name is a class shows when it is loaded.
    if not class_name or not {class_name, _ANY} & bound.keys():
        classes = [one for one, is_class in bound.items() if is_class] or [*bound]
        listed = ", ".join(f"{given}:{one}" for one in classes) or "no class"
        what = f"{class_name!r} is not in it" if class_name else "the class is missing"
        raise EnvironmentLoadError(
            f"{name}: {what}; expected file.py:Class, and the file has: {listed}"
            f"{_meant(class_name, classes)}"
        )
    module, folder = _module_of(path.resolve())
    return EnvironmentLocation(
        id=f"{os.path.relpath(path)}:{class_name}",
        version="0",
        factory=f"{module}:{class_name}",
        interpreter="",
        search_path=(str(folder),),
    )


_ANY = "*"
"""What `from module import *` binds."""


def _bound_names_of(path: Path) -> dict[str, bool]:
    """Return each name that may be bound at the top level of a file, without running it.

    The value is whether the name is that of a class which is written in the file.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise EnvironmentLoadError(f"{path}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise EnvironmentLoadError(f"{path} cannot be read as Python: {error}") from None
    bound: dict[str, bool] = {}
    pending: list[ast.AST] = [*reversed(tree.body)]
    while pending:
        one = pending.pop()
        match one:
            case ast.ClassDef(name=name):
                bound[name] = True
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    bound.setdefault(alias.asname or alias.name.partition(".")[0], False)
            case ast.Name(id=name, ctx=ast.Store()):
                bound.setdefault(name, False)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass  # What is bound inside is not bound in the file.
            case _:
                pending += reversed([*ast.iter_child_nodes(one)])
    return bound


def _module_of(path: Path) -> tuple[str, Path]:
    """Return the name of a file's module and the folder to import it from.

    A file in a package is imported as a part of it, so that its relative imports work.
    """
    if not path.stem.isidentifier():
        raise EnvironmentLoadError(
            f"{path}: a file that is imported has a name of letters, digits and _; rename it"
        )
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    return ".".join(parts), folder


def _meant(name: str, known: list[str]) -> str:
    found = nearest(name, known) if name else []
    return f"; did you mean {' or '.join(found)}?" if found else ""
