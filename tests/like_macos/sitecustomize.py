"""Makes a Python on Linux lack what it lacks on macOS, as far as Telescope's own code can see.

Python imports it at its start where its folder is in PYTHONPATH. The file `names.txt` beside it
says what is taken away, such as os.pipe2; see tests/macos.py. Workers of environments are given
that variable as well.
"""

import errno
import importlib
import os
import platform
import resource
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

waitid, how = os.waitid, os.WEXITED | os.WNOHANG | os.WNOWAIT
# First, since other modules look at their import for what there is.
for name in Path(__file__).with_name("names.txt").read_text().split():
    module, _, attribute = name.partition(".")
    vars(importlib.import_module(module)).pop(attribute, None)

import shutil  # noqa: E402 - it looks at its import for what there is

# Their halves for macOS are not there: they have to be in memory before the platform changes.
IMPORTED_BEFORE = """
    asyncio ctypes.util http.server multiprocessing.connection urllib.request uuid webbrowser
    zoneinfo
"""
for name in IMPORTED_BEFORE.split():
    importlib.import_module(name)
sysconfig.get_config_vars()
platform.uname()

HIDDEN = ("/proc", "/sys")
PROGRAMS = ("bwrap", "setpriv", "ip")


def is_hidden(path: object) -> bool:
    """Return whether code of Telescope asks for something that macOS does not have."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.fsdecode(path)
    if text not in HIDDEN and not text.startswith(tuple(f"{one}/" for one in HIDDEN)):
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if "/telescope_" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def look_for_hidden(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and is_hidden(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, "not on macOS", arguments[0])


def without_hidden(function):
    def asked(path, *arguments, **options):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "not on macOS", path)
        return function(path, *arguments, **options)

    return asked


def without_programs(function):
    def found(command, *arguments, **options):
        if os.path.basename(command) in PROGRAMS:
            return None
        return function(command, *arguments, **options)

    return found


def without_addresses(function):
    def limited(which, limits):
        if which == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        return function(which, limits)

    return limited


def without_ended_groups(function):
    def sent(group, number):
        with suppress(ChildProcessError):
            if waitid(os.P_PID, group, how) is not None:
                raise PermissionError(errno.EPERM, "its only member has ended")
        return function(group, number)

    return sent


for function in ("stat", "lstat", "readlink"):
    setattr(os, function, without_hidden(getattr(os, function)))
shutil.which = without_programs(shutil.which)
os.killpg = without_ended_groups(os.killpg)
resource.setrlimit = without_addresses(resource.setrlimit)
sys.addaudithook(look_for_hidden)
sys.platform = "darwin"
