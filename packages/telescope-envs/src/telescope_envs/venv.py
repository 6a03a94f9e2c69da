"""A virtual environment for one environment: telescope-core, what it needs, and its wheel.

Files are hard links: to the package cache of uv, and to the telescope-core that builds it. So a
second environment costs almost no time and no space.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from contextlib import suppress
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.packages import create_venv, install_into
from telescope_envs.registry.records import Release
from telescope_envs.subprocesses import last_line, run_program

CORE = "telescope-core"
_PROBE_LIMIT_S = 120.0
_PROBE = (
    "import sys; from telescope_core.open import load_environment_class as load; "
    "load(sys.argv[1]).from_settings({})"
)


def venv_folder(release: Release) -> Path:
    """Return where the virtual environment of `release` belongs, below this interpreter's prefix.

    Its name holds the digest of the wheel, so that another build never meets an old folder.
    """
    name = f"{release.owner}-{release.name}-{release.version}-{release.wheel.sha256[:12]}"
    return Path(sys.prefix) / "share" / "telescope" / "venvs" / name


def build_venv(release: Release, wheel: Path, folder: Path) -> Path:
    """Make the virtual environment of `release` in `folder` and try its code there.

    It is built aside and renamed into place, whole or not at all. Returns its interpreter.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        create_venv(scratch)
        core = distribution(CORE)
        needs = [text for text in [*(core.requires or []), *release.requires_dist] if _counts(text)]
        install_into(_python(scratch), needs, wheel, needed_by=release.id)
        link_distribution(core, _site_packages(scratch))
        link_byte_code(_site_packages(scratch))
        _probe(_python(scratch), release)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return _python(folder)


def remove_venv(interpreter: str) -> None:
    """Remove the virtual environment of `interpreter`; fine when it is gone."""
    shutil.rmtree(Path(interpreter).parents[1], ignore_errors=True)


def link_distribution(found: Distribution, site_packages: Path) -> None:
    """Put the files of an installed distribution into another site-packages, as hard links.

    An editable one is a pointer to its source, and stays that.
    """
    for file in found.files or ():
        source = Path(str(found.locate_file(file)))
        if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
            continue
        target = site_packages / Path(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy2(source, target)


def link_byte_code(site_packages: Path) -> None:
    """Link the byte code that this interpreter has of the very same files.

    Compiling it again would cost each environment seconds at its first start, and megabytes.
    """
    here = Path(sysconfig.get_path("purelib"))
    for source in site_packages.rglob("*.py"):
        ours = here / source.relative_to(site_packages)
        name = Path(cache_from_source(str(ours)))
        target = source.parent / name.parent.name / name.name
        with suppress(OSError):  # no byte code here, or another file system: then it is compiled
            if ours.samefile(source):
                target.parent.mkdir(exist_ok=True)
                os.link(name, target)


def _counts(text: str) -> bool:
    requirement = Requirement(text)
    marker = requirement.marker
    return requirement.name != CORE and (marker is None or marker.evaluate({"extra": ""}))


def _probe(python: Path, release: Release) -> None:
    """Load the environment where it will run, with nothing of this process but a search path."""
    command = [str(python), "-B", "-P", "-c", _PROBE, release.factory]
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    late = f"{release.id}: not loaded after {_PROBE_LIMIT_S:g} s; its import must be quick"
    done = run_program(command, environ=environ, limit_s=_PROBE_LIMIT_S, late=late)
    if done.returncode:
        raise EnvironmentLoadError(
            f"{release.id} cannot be loaded in a virtual environment of its own: {last_line(done)}"
        )


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _site_packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"
