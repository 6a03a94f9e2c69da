"""Build the virtual environment of one environment: telescope-core, locked packages, its wheel.

Files are copies of those in uv's package cache and of the telescope-core that builds it. Links
would take no space, but an edit in one environment would reach the cache, every other environment
and the Python that trains.
"""

import filecmp
import os
import shutil
import sys
import sysconfig
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from telescope_core.base.errors import EnvironmentLoadError
from telescope_envs.install.data import (
    BUILDING,
    VENV_RECORD,
    is_running,
    key_of,
    python_of,
    venv_folder,
)
from telescope_envs.install.loading import probe
from telescope_envs.install.requirements import CORE, install_requirements
from telescope_envs.install.steps import InstallOptions, Progress, Step
from telescope_envs.processes.uv import Uv
from telescope_envs.records.files import files_below, remove_tree, unwritable
from telescope_envs.records.installed import Installation
from telescope_envs.rules.wheel import WheelContents, read_release, record_of

_INSTALLER = "telescope\n"


def write_wheel(contents: WheelContents, site_packages: Path) -> None:
    """Write every file of an inspected wheel, and its RECORD.

    Raises EnvironmentLoadError, before anything is written, if another package has one of them.
    """
    info = f"{contents.module}-{contents.version}.dist-info"
    files = {path: data for path, data in contents.files.items() if path != f"{info}/RECORD"}
    files[f"{info}/INSTALLER"] = _INSTALLER.encode()
    files[f"{info}/RECORD"] = record_of(dict(sorted(files.items())), f"{info}/RECORD")
    for path in files:
        if (site_packages / path).exists() or (site_packages / path).is_symlink():
            raise EnvironmentLoadError(
                f"{contents.distribution} {contents.version}: {site_packages / path} is there "
                "already, and belongs to something else; remove it and install again"
            )
    # What describes the package comes first, with the list of its files: if this process is killed
    # in between, the next installation can remove what there is.
    for path, data in sorted(files.items(), key=lambda one: not one[0].startswith(f"{info}/")):
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # "x": nothing may have appeared there in between, a link to another place least of all.
        with target.open("xb") as file:
            file.write(data)
        os.chmod(target, 0o644)


def build_venv(
    planned: Installation, wheel: Path, uv: Uv, *, options: InstallOptions, progress: Progress
) -> None:
    """Build the virtual environment of `planned` and check that its code loads there.

    `planned` is the record to write; its interpreter is the one in the finished virtual
    environment. The environment is built in a scratch folder and renamed into place only when
    complete. The caller holds the environment's lock, which `uv` inherits.
    """
    locked, label = planned.locked, f"{planned.release.id} {planned.release.version}"
    assert locked is not None, "what has a virtual environment of its own is locked"
    folder = venv_folder(locked)
    if is_running(folder):
        raise EnvironmentLoadError(
            f"{label} cannot be built again while processes run in {folder}; end them, and try "
            "again"
        )
    scratch = folder.with_name(f"{BUILDING}{key_of(locked.id)}")
    try:
        with new_folder(folder, scratch):
            progress(f"{label}: {Step.BUILD}")
            uv.make_venv(scratch, moves=True)
            progress(f"{label}: {Step.DEPENDENCIES}")
            python, lines = python_of(scratch), locked.requirements
            install_requirements(python, lines, uv, needed_by=locked.id, options=options)
            progress(f"{label}: {Step.WHEEL}")
            # Its bytes are read once, and checked again.
            write_wheel(read_release(wheel.read_bytes(), planned.release), site_packages(scratch))
            copy_distribution(distribution(CORE), site_packages(scratch))
            copy_byte_code(site_packages(scratch))
            progress(f"{label}: {Step.PROBE}")
            probe(python, planned.release)
            (scratch / VENV_RECORD).write_bytes(planned.as_json())
    except OSError as error:
        what = f"{label}: {error.filename or folder}"
        raise unwritable(what, error, "nothing was installed") from error


@contextmanager
def new_folder(folder: Path, scratch: Path) -> Generator[None]:
    """Move `scratch` to `folder` when the block has filled it; removes it on failure."""
    clear_scratch(scratch)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
        clear_scratch(folder)
        scratch.rename(folder)
    except BaseException:
        remove_tree(scratch)
        raise


def clear_scratch(folder: Path) -> None:
    """Remove the content at the place of a new folder, on which nothing may be built."""
    if not remove_tree(folder):
        raise EnvironmentLoadError(
            f"{folder} is left of an earlier installation and cannot be removed; remove it with "
            "the rights of whoever made it, and install again"
        )


def copy_distribution(found: Distribution, site_packages: Path) -> None:
    """Copy the files of an installed distribution into another site-packages.

    An editable install remains a pointer to its source.
    """
    for file in found.files or ():
        source = Path(str(found.locate_file(file)))
        if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
            continue
        target = site_packages / Path(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def copy_byte_code(site_packages: Path) -> None:
    """Copy the byte code that this interpreter has compiled from files with the same bytes.

    Compiling it again would cost each environment seconds at its first start.
    """
    here = Path(sysconfig.get_path("purelib"))
    for source in [path for path in files_below(site_packages) if path.suffix == ".py"]:
        ours = here / source.relative_to(site_packages)
        # Below PYTHONPYCACHEPREFIX, if that is set, which the new environment does not share.
        name = Path(cache_from_source(str(ours)))
        target = source.parent / "__pycache__" / name.name
        with suppress(OSError):  # Python compiles what cannot be copied
            if name.is_file() and filecmp.cmp(ours, source, shallow=False):
                target.parent.mkdir(exist_ok=True)
                shutil.copy2(name, target)
                # Byte code counts for the time of its source that is written in it.
                moment = ours.stat()
                os.utime(source, ns=(moment.st_atime_ns, moment.st_mtime_ns))


def site_packages(folder: Path) -> Path:
    """Return the package folder of a virtual environment of this Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"
