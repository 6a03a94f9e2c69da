"""Choose the Python of local sandboxes: one that an ordinary user of this machine can read.

Root runs sandboxes as another user, who cannot run an interpreter in somebody's home, so one of the
system is used instead.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from telescope_core.sandboxes.local.bubblewrap import Interpreter
from telescope_core.sandboxes.protocol import SandboxUnavailableError

_ASK = """
import sys, sysconfig
paths = sysconfig.get_paths()
print(sys.base_prefix, paths["stdlib"], paths["purelib"], paths["platlib"], sep="\\n")
"""
_COMPILE = """
import importlib._bootstrap_external as written, sys
source = sys.stdin.buffer.read()
code = compile(source, "supervisor", "exec", dont_inherit=True, optimize=0)
sys.stdout.buffer.write(written._code_to_timestamp_pyc(code, 0, len(source)))
"""
_PACKAGES_OF_DEBIAN = ("/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages")


def find_interpreter(path: str | None = None) -> Interpreter:
    """Return the Python at `path`, or this one, or that of the system, whichever can be run."""
    if path is not None:
        candidates = [path]
    else:
        own = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
        system = [shutil.which("python3", path=folder) for folder in ("/usr/bin", "/usr/local/bin")]
        candidates = [str(own), *(one for one in system if one)]
    for candidate in candidates:
        real = str(Path(candidate).resolve())
        if Path(real).is_file() and _can_be_reached(Path(real)):
            return _described(real)
    raise SandboxUnavailableError(
        f"local sandboxes need a Python that every user of this machine can run, and "
        f"{' and '.join(candidates)} cannot be; install one (as root on Debian or Ubuntu: "
        "apt-get install python3-minimal)"
    )


def compiled(interpreter: Interpreter, source: bytes) -> bytes:
    """Return `source` compiled to byte code of `interpreter`, which saves time at each start."""
    return _asked(interpreter.path, _COMPILE, source)


def _described(path: str) -> Interpreter:
    prefix, library, *packages = _asked(path, _ASK, b"").decode().splitlines()
    beside = [f"{library}/{name}" for name in ("site-packages", "dist-packages")]
    local = f"/usr/local/lib/{Path(library).name}"
    shared = [f"{local}/{name}" for name in ("site-packages", "dist-packages")]
    hidden = dict.fromkeys([*packages, *beside, *shared, *_PACKAGES_OF_DEBIAN])
    return Interpreter(
        path=path,
        prefix=prefix,
        package_folders=tuple(folder for folder in hidden if Path(folder).is_dir()),
    )


def _asked(path: str, code: str, given: bytes) -> bytes:
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", code],
            input=given,
            capture_output=True,
            check=True,
            timeout=60,
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(
            f"local sandboxes cannot use the Python {path}: {error}"
        ) from error
    return done.stdout


def _can_be_reached(path: Path) -> bool:
    """Return whether the user of sandboxes can run a file; root uses another user for them."""
    if os.getuid() != 0:
        return os.access(path, os.X_OK)
    modes = [one.stat().st_mode for one in (path, *path.parents)]
    return all(mode & stat.S_IXOTH for mode in modes) and bool(modes[0] & stat.S_IROTH)
