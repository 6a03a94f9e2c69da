"""Build an environment's wheel reproducibly: equal sources give equal bytes on any machine.

The project's declared build backend builds the wheel from a copy of the sources. The wheel is then
rewritten with sorted, uncompressed entries, one file mode and one fixed time (SOURCE_DATE_EPOCH if
set), because compressors, clocks and umasks differ between machines.
"""

import io
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import uv
from packaging.requirements import Requirement

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, RegistryError
from telescope_envs.install.packages import missing_requirements
from telescope_envs.processes.git import reading, run_git
from telescope_envs.processes.running import run_program
from telescope_envs.processes.uv import config_options, index_settings
from telescope_envs.records.files import read_file, sha256_of
from telescope_envs.records.model import read_pyproject, table_at, texts_at
from telescope_envs.records.projects import require_project
from telescope_envs.records.reading import MAX_WHEEL_BYTES
from telescope_envs.rules.wheel import WheelContents, check_publishable, read_wheel, record_of

_CACHES = {".git", ".hg", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
_NOT_AT_THE_TOP = {".venv", "venv", "dist", "build", "runs", "node_modules"}
"""Folders in the project root that are omitted when the project is not in git."""


def source_files(project: Path) -> list[Path]:
    """Return the project's files, sorted, relative to it; in git, without ignored files."""
    return [path for path in _listed(project) if (project / path).is_file()]


def _listed(project: Path) -> list[Path]:
    """Return the paths of files, links and repositories within; some may not exist anymore.

    Locks of an editor are left out, unless git holds them.
    """
    require_project(project)
    listed = git_text(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard", ".")
    if listed is None:
        found = [path.relative_to(project) for path in _walk(project)]
    else:
        found = [Path(name) for name in listed.split("\0") if name]
        if locks := {path for path in found if _is_editor_lock(project / path)}:
            held = git_text(project, "ls-files", "-z", "--cached", ".") or ""
            locks -= {Path(name) for name in held.split("\0")}
        found = [path for path in found if path not in locks]
    return sorted({path for path in found if _is_text(path)})


def copy_sources(project: Path, target: Path) -> None:
    """Copy the project's files into the folder `target`, as plain files with default modes.

    Raises ConfigError for what cannot be copied. Repositories within the project are left out.
    """
    root = project.resolve()
    for path in _listed(project):
        source = project / path
        if not source.is_file():
            is_repository = source.is_dir() and not source.is_symlink()
            if is_repository or not os.path.lexists(source):
                continue
            raise ConfigError(
                f"{source} is {_what(source)}, but a release must contain its own files; put the "
                "files there themselves, remove it, or let git ignore it"
            )
        if not source.resolve().is_relative_to(root):
            raise ConfigError(
                f"{source} is a link to a file outside the project, but a release must contain its "
                "own files; replace the link with the file"
            )
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            data = read_file(source, max_bytes=MAX_WHEEL_BYTES, follows_link=True)
        except OSError as error:
            raise ConfigError(
                f"{source} cannot be read: {error.strerror}; correct it, or let git ignore it"
            ) from error
        (target / path).write_bytes(data)


def left_out(project: Path, files: Collection[str]) -> list[str]:
    """Return a line for each file of the project's package that its wheel, of `files`, lacks.

    The line names the file, and the setting that puts it into the wheel.
    """
    packages = {name.partition("/")[0] for name in files} & {
        path.parent.name for path in _walk(project) if path.name == "__init__.py"
    }
    listed = set(_listed(project))
    lines: list[str] = []
    for path in sorted(one.relative_to(project) for one in _walk(project)):
        package = next((name for name in path.parts[:-1] if name in packages), None)
        if package is None or path.suffix == ".pyc":
            continue
        if "/".join(path.parts[path.parts.index(package) :]) in files:
            continue
        if not _is_text(path):
            advice = "its name is not UTF-8, which a wheel cannot hold; if it is read, rename it"
        elif not (project / path).is_file():
            advice = f"it is {_what(project / path)}, and a release holds only files"
        elif path in listed:
            advice = (
                "its build leaves it out; if it is read, with hatchling name it in artifacts under "
                "[tool.hatch.build.targets.wheel], with setuptools under "
                "[tool.setuptools.package-data]"
            )
        elif listed.intersection(path.parents):
            advice = (
                "it stands in another git repository within the project (a submodule), whose files "
                "a release does not hold; if it is read, copy it into the project"
            )
        else:
            advice = (
                "git ignores it, and a release holds no ignored file; if it is read, take it out "
                "of .gitignore"
            )
        shown = os.fsencode(path).decode(errors="replace")
        lines.append(f"{shown} is not in the wheel, although it stands in the package; {advice}")
    return lines


def is_in_git(folder: Path) -> bool:
    """Return whether `folder` is part of a git repository."""
    return git_text(folder, "rev-parse", "--show-toplevel") is not None


def git_text(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails, is not installed, or `folder` is not in git.

    Nothing that the repository's configuration names is started.
    """
    try:
        with reading(folder) as environ:
            done = run_git(folder, *arguments, environ=environ)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _is_text(path: Path) -> bool:
    return not re.search("[\udc80-\udcff]", str(path))  # how Python writes other bytes


def _what(path: Path) -> str:
    """Return the words for something that is no file."""
    if path.is_symlink():
        return (
            "a link to a folder" if path.is_dir() else f"a link to {os.readlink(path)!r}, no file"
        )
    return "no plain file but a named pipe, a device or a socket"


def _walk(project: Path) -> list[Path]:
    """Return the files and links below the project; a linked folder is not entered."""
    found: list[Path] = []
    for folder, folders, files in os.walk(project):
        skipped = _CACHES | _NOT_AT_THE_TOP if Path(folder) == project else _CACHES
        folders[:] = [name for name in folders if name not in skipped]
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [Path(folder) / name for name in (*files, *linked)]
    return [path for path in found if not _is_editor_lock(path)]


def _is_editor_lock(path: Path) -> bool:
    """Return whether it is the link to nothing by which Emacs marks a file with unsaved changes."""
    return path.name.startswith(".#") and path.is_symlink() and not path.exists()


_DEFAULT_EPOCH = 1577836800
"""1 January 2020; any fixed time that a zip file can hold would do."""
_TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltWheel:
    """A wheel that was built and inspected."""

    path: Path
    contents: WheelContents
    sha256: str
    size: int
    """Bytes."""


def build_and_inspect(project: Path, folder: Path) -> BuiltWheel:
    """Build `project` into `folder`; raises, and writes no wheel, if inspection refuses it."""
    with tempfile.TemporaryDirectory() as scratch:
        made = build_wheel(project, Path(scratch))
        data = made.read_bytes()
        try:
            contents = read_wheel(data, made.name)
            check_publishable(contents)
        except RegistryError as error:  # it is no file of a registry yet
            raise ConfigError(str(error)) from error
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / made.name
        path.write_bytes(data)
    digest = sha256_of(data)
    return BuiltWheel(path=path, contents=contents, sha256=digest, size=len(data))


def build_wheel(project: Path, folder: Path) -> Path:
    """Build `project` into the existing `folder`; equal sources give equal bytes."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", str(_DEFAULT_EPOCH))
    if not epoch.isdigit():
        raise ConfigError(f"SOURCE_DATE_EPOCH must be seconds since 1970, got {epoch!r}")
    with tempfile.TemporaryDirectory() as scratch:
        copy, out = Path(scratch) / "sources", Path(scratch) / "out"
        copy.mkdir()
        copy_sources(project, copy)
        _run_backend(project, copy, out, epoch=epoch)
        wheels = list(out.glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigError(f"{project}: its build made {len(wheels)} wheels, expected 1")
        target = folder / wheels[0].name
        try:
            made = read_file(wheels[0], max_bytes=MAX_WHEEL_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{project}: its build made {target.name}, which cannot be read: {error.strerror}"
            ) from error
        target.write_bytes(normalise(made, epoch=int(epoch)))
    return target


def normalise(data: bytes, *, epoch: int) -> bytes:
    """Return the wheel rewritten so that its bytes depend only on its contents."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    files = {path: content for path, content in files.items() if not path.endswith("/")}
    record_path = next(path for path in files if path.endswith(".dist-info/RECORD"))
    wheel_path = record_path.replace("RECORD", "WHEEL")
    lines = files[wheel_path].decode().splitlines()
    kept = [line for line in lines if line and not line.startswith("Generator:")]
    files[wheel_path] = "".join(f"{line}\n" for line in kept).encode()
    order = sorted(files, key=lambda path: (path == record_path, ".dist-info/" in path, path))
    files[record_path] = record_of({path: files[path] for path in order[:-1]}, record_path)
    moment = datetime.fromtimestamp(epoch, UTC)
    rewritten = io.BytesIO()
    with zipfile.ZipFile(rewritten, "w", zipfile.ZIP_STORED) as archive:
        for path in order:
            info = zipfile.ZipInfo(path, moment.timetuple()[:6])
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, files[path])
    return rewritten.getvalue()


def _run_backend(project: Path, copy: Path, out: Path, *, epoch: str) -> None:
    """Build a wheel of `copy` in `out` with the declared build backend.

    If this interpreter has the build requirements, they are used; otherwise uv installs them into
    an isolated environment.
    """
    isolated = bool(missing_requirements(_build_requirements(project)))
    arguments = ["build", "--wheel", "--python", sys.executable, "--out-dir", str(out)]
    arguments += ["--no-create-gitignore", "--no-progress"]
    arguments += [] if isolated else ["--no-build-isolation"]
    # The backend is the project's own code. It gets no token and no home, and the addresses of
    # indexes, which may hold passwords, only where uv has to fetch what it is built with.
    environ = index_settings(os.environ, has_index=isolated)
    # uv would look for its cache in the home.
    home = Path(environ.get("HOME", "~")).expanduser()
    caches = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    environ["UV_CACHE_DIR"] = environ.get("UV_CACHE_DIR") or str(caches / "uv")
    for name in ("HOME", "TMPDIR", "NETRC"):
        environ.pop(name, None)
    arguments += config_options(os.environ) if isolated else ["--no-config"]
    late = f"{project}: no wheel after {_TIME_LIMIT_S:g} s; check the network and the build backend"
    done = run_program(
        [uv.find_uv_bin(), *arguments, str(copy)],
        environ={**environ, "SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"},
        limit_s=_TIME_LIMIT_S,
        late=late,
    )
    if done.returncode:
        words = done.stderr.strip().replace(str(copy), str(project))
        raise EnvironmentLoadError(f"{project} cannot be built. Output of uv:\n{words}")


def _build_requirements(project: Path) -> list[str]:
    """Return the requirements in `[build-system]`; raises ConfigError when there is no backend."""
    path = project / "pyproject.toml"
    system = table_at(read_pyproject(project), "build-system", path=path)
    if "build-backend" not in system:
        raise ConfigError(
            f"{path} declares no build backend; add [build-system] with "
            'requires = ["hatchling>=1.27"] and build-backend = "hatchling.build"'
        )
    needs = texts_at(system, "requires", "build-system", path=path)
    for text in needs:
        try:
            Requirement(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: build-system.requires: {error}") from None
    return needs
