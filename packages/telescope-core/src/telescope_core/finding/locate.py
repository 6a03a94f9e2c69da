"""Locate the code of an environment by its name, and import it from there.

`telescope_core.open` describes the forms of names.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from telescope_core.base.code_places import own_frame
from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import (
    EnvironmentLoadError,
    NotInstalledError,
    TelescopeError,
    UnknownNameError,
    nearest,
    unknown_name,
)
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentLocator
from telescope_core.environments.author_errors import contained
from telescope_core.environments.base import Environment
from telescope_core.finding.code_names import location_of_file, names_class, names_file
from telescope_core.finding.schemes import adapted, installed_version, schemes


def locators() -> list[EnvironmentLocator]:
    """Return every installed locator."""
    points = sorted(entry_points(group="telescope.environment_locators"), key=lambda p: p.name)
    return [point.load()() for point in points]


def locate_environment(name: str) -> EnvironmentLocation:
    """Return the location of `name`; raises UnknownNameError with the command to install it."""
    if names_file(name):
        return location_of_file(name)
    if names_class(name):
        scheme = name.partition(":")[0]
        if nearest(scheme, schemes()) and find_spec(scheme.partition(".")[0]) is None:
            where = f"({name!r}, which is no module either)"
            raise unknown_name("scheme", scheme, schemes(), where)
        return EnvironmentLocation(id=name, version="0", factory=name, interpreter="")
    known: list[str] = []
    hints: list[str] = []
    installed = locators()
    for locator in installed:
        location = locator.locate(name)
        if location is not None:
            return location
        known += locator.known_names()
        hints.append(locator.hint(name))
    here = _adapted_here(name)
    if here is not None:
        return here
    advice = " or ".join(hint for hint in hints if hint)
    if advice:
        raise NotInstalledError(f"environment {name!r} is not installed; {advice}")
    if not installed:
        raise UnknownNameError(
            f"environment {name!r} cannot be looked up: names of installed environments need the "
            "package telescope-envs; install it, or give the environment as module:Class"
        )
    raise unknown_name("environment", name, known)


def _adapted_here(name: str) -> EnvironmentLocation | None:
    """Return the location of `SCHEME:ID` if this Python has what its adapter needs, else None."""
    found = adapted(name)
    if found is None:
        return None
    version = installed_version(found.frameworks[0])
    framework = found.fitting(version)
    if framework is None:
        return None
    return EnvironmentLocation(
        id=name,
        version=version or "0",
        factory=framework.factory,
        interpreter="",
        config={"id": found.id},
    )


def load_located(location: EnvironmentLocation) -> type[Environment]:
    """Import a class that this interpreter can import, from its own folders first."""
    use_search_path(location.search_path)
    return load_environment_class(location.factory, folders=location.search_path)


def use_search_path(folders: Sequence[str]) -> None:
    """Let this process, and those it starts, import from `folders` before all others."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _require_from(module_name: str, folders: Sequence[str]) -> None:
    """Raise if this process had already imported the module, or its package, from another place."""
    for name in (module_name.partition(".")[0], module_name):
        module = sys.modules.get(name)
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        is_inside = any(Path(one).is_relative_to(folder) for one in places for folder in folders)
        if module is not None and folders and not is_inside:
            raise EnvironmentLoadError(
                f"{module_name} is in {folders[0]}, but this process has imported another {name} "
                f"before, {places[0] or 'which is a part of Python'}; rename it, or use one of the "
                "two in a process"
            )


def _what_is_missing(module_name: str, error: ImportError) -> str:
    """Return a sentence with the module that cannot be imported, the line, and what to do."""
    package = module_name.partition(".")[0]
    if error.name not in (module_name, package):
        return f"{_where_raised(error)}: {error}; reinstall it, or install what it misses"
    beside = Path(f"{package}.py")
    folder = Path(package)
    if beside.is_file() or folder.is_dir():
        return (
            f"{error}; it is in this folder, which is not searched: name it {beside}:Class, or "
            "set PYTHONPATH=. and run it again"
        )
    return (
        f"no module {module_name!r} is on the search path: set PYTHONPATH to the folder that holds "
        f"{package}.py, or give an installed environment's name"
    )


def _where_raised(error: Exception) -> str:
    """Return file and line of the code that raised while a module was imported."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    last = own_frame(error)
    assert last is not None, "an error that was raised has frames"
    return f"{last.filename}, line {last.lineno}"


def load_environment_class(factory: str, *, folders: Sequence[str] = ()) -> type[Environment]:
    """Import `module:Class`; raises EnvironmentLoadError with the reason if it cannot be used.

    `folders`: the folders that hold the module; empty = wherever it is found.
    """
    module_name, _, class_name = factory.partition(":")
    try:
        with contained():
            module = importlib.import_module(module_name)
    except ImportError as error:
        _require_from(module_name, folders)
        raise EnvironmentLoadError(
            f"cannot import environment {factory!r}: {_what_is_missing(module_name, error)}"
        ) from error
    except TelescopeError as error:  # it names its place
        raise EnvironmentLoadError(f"cannot import environment {factory!r}: {error}") from error
    except Exception as error:
        raise EnvironmentLoadError(
            f"cannot import environment {factory!r}: {_where_raised(error)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _require_from(module_name, folders)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        classes = [name for name, member in vars(module).items() if isinstance(member, type)]
        meant = nearest(class_name, classes)
        advice = f"; did you mean {' or '.join(meant)}?" if meant else ""
        raise EnvironmentLoadError(
            f"{factory!r} is not an Environment class; expected `module:Class`, got {found!r} in "
            f"{getattr(module, '__file__', None) or module_name}{advice}"
        )
    return found
