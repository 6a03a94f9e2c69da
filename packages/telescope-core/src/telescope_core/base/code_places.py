"""Find the code of an environment's author: names, files and lines for messages."""

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from types import FrameType
from typing import Any, cast

from telescope_core.base.errors import EnvironmentLoadError, nearest

_OWN_PACKAGES = ("telescope_core", "telescope_adapters")
"""Packages whose environment classes are Telescope's own."""
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@cache
def libraries() -> tuple[str, ...]:
    """Return the folders of Python's and Telescope's own modules, which hold no author's code."""
    specs = [find_spec(package) for package in _OWN_PACKAGES]
    own = [place for one in specs if one for place in one.submodule_search_locations or ()]
    return (sysconfig.get_path("stdlib"), *own)


def is_own_module(module: str) -> bool:
    """Return whether `module` holds environment classes of Telescope itself."""
    return module.partition(".")[0] in _OWN_PACKAGES


def location_of(function: object) -> str:
    """Return `name (file:line)` of a function or method, for error messages."""
    plain = inspect.unwrap(cast(Callable[..., Any], function))
    plain = getattr(plain, "__func__", plain)
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__qualname__", repr(plain)).rpartition("<locals>.")[2]
    if code is None:
        return name
    return f"{name} ({shown_path(code.co_filename)}:{code.co_firstlineno})"


def shown_path(path: str) -> str:
    """Return `path`, relative to the working directory if it is inside it."""
    inside = path.startswith(os.getcwd() + os.sep)
    return os.path.relpath(path) if inside else path


def raised_at(error: BaseException, module: str = "") -> str:
    """Return ` (file:line)` of the author's code that raised `error`, or of the innermost code.

    `module` is the author's, as for `own_frame`.
    """
    frame = own_frame(error, module)
    return f" ({shown_path(frame.filename)}:{frame.lineno})" if frame is not None else ""


def told_at(text: str | None, module: str) -> str:
    """Return ` (file:line)` of the code of `module` in the text of a traceback; empty if none."""
    place = _place_of(module)
    found = re.findall(r'File "(.+?)", line (\d+)', text or "") if place else []
    own = [f" ({shown_path(file)}:{line})" for file, line in found if file.startswith(place)]
    return own[-1] if own else ""


def own_frame(error: BaseException, module: str = "") -> traceback.FrameSummary | None:
    """Return the innermost place in an author's code that raised `error`.

    If the error's own traceback has no such place, that of its cause is used, for example of a
    StopIteration behind a generator's RuntimeError. If there is none either, code of installed
    packages is used, which may be the author's too, or else any code. Where the author's `module`
    is known, its files come first: it may be installed beside the framework that calls it.
    """
    chain = _with_causes(error)
    tracebacks = [traceback.extract_tb(raised.__traceback__) for raised in chain]
    if place := _place_of(module):
        for frames in tracebacks:
            own = [frame for frame in frames if frame.filename.startswith(place)]
            if own:
                return own[-1]
    for others in ((*libraries(), *_INSTALLED, "<"), (*libraries(), "<"), ()):
        for frames in tracebacks:
            own = [frame for frame in frames if not frame.filename.startswith(others)]
            if own:
                return own[-1]
    return None


def _place_of(module: str) -> str:
    """Return the file of a module, or the folder of a package; empty if it is unknown.

    A module whose import failed is no longer in `sys.modules`, but can still be found.
    """
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None and module.isidentifier():
        spec = find_spec(module)
        file = spec.origin if spec is not None and spec.has_location else None
    if not file:
        return ""
    folder, name = os.path.split(file)
    return folder + os.sep if name.startswith("__init__.") else file


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return `error`, its cause, the cause of that, and so on; each once."""
    chain: list[BaseException] = []
    came_of: BaseException | None = error
    while came_of is not None and not any(came_of is other for other in chain):
        chain.append(came_of)
        came_of = came_of.__cause__ or came_of.__context__
    return chain


def called_at() -> str:
    """Return `file:line` of the author's code that is being run now."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith((*libraries(), "<")):
        frame = frame.f_back
    return "" if frame is None else f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def require_method(marked: object, decorator: str) -> None:
    """Raise EnvironmentLoadError if `decorator` was applied to something other than a method."""
    if callable(marked) and not isinstance(marked, type):
        return
    advice = "write it above `def`, without arguments, or with arguments by name"
    if decorator in ("@reward", "@group_reward") and isinstance(marked, int | float | str):
        advice = f"give the weight by name: {decorator}(weight={marked})"
    raise EnvironmentLoadError(
        f"{called_at()}: {decorator} marks a method, got {marked!r:.80} ({type(marked).__name__}); "
        f"{advice}"
    )


def require_known(
    decorator: str, more: Sequence[object], unknown: Mapping[str, object], known: Sequence[str]
) -> None:
    """Raise EnvironmentLoadError for arguments that `decorator` does not take.

    `more` are those by position after the method, and `known` the names of those that it takes.
    """
    takes = f"it takes {', '.join(known)}" if known else f"write {decorator} alone above `def`"
    if more:
        raise EnvironmentLoadError(
            f"{called_at()}: {decorator} takes its arguments by name, got {more[0]!r:.80} by "
            f"position; {takes}"
        )
    for name in unknown:
        close = nearest(name, known)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise EnvironmentLoadError(
            f"{called_at()}: {decorator} has no argument {name!r}; {meant}{takes}"
        )


def is_authors(method: Callable[..., Any]) -> bool:
    """Return whether a method was written by the author, not inherited from Telescope."""
    return not is_own_module(method.__module__ or "")
