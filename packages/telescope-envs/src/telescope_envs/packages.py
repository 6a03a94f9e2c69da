"""Changing an interpreter's packages with uv: requirements, one verified wheel, removal.

The version of an installed package never changes. An environment that needs another version is
refused with an error that says so.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.home import data_folder
from telescope_envs.package_index import config_options, index_settings
from telescope_envs.subprocesses import run_program

_TIME_LIMIT_S = 900.0
_NO_WHEEL = re.compile(r"Wheels are required for `([^`]+)`|(\S+?)(?:==\S+)? has no usable wheels")
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_INFO = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._]*)-(?P<version>[^-]+)\.dist-info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Uv:
    """Runs uv, with the sources that packages may come from."""

    offline: bool = False
    """Use no network, only uv's cache."""
    wheels: Path | None = None
    """A folder of wheels to take packages from, instead of every index."""
    heirs: tuple[int, ...] = ()
    """Descriptors of locks that stay held while uv runs, even if this process is killed."""

    def run(self, arguments: Sequence[str], *, failure: str) -> str:
        """Run uv and return its output; raises EnvironmentLoadError that begins with `failure`."""
        late = f"{failure}: uv did not finish in {_TIME_LIMIT_S:g} s; check the network"
        finished = run_program(
            [uv.find_uv_bin(), *arguments, *self._options()],
            environ=index_settings(os.environ, has_index=self.wheels is None),
            limit_s=_TIME_LIMIT_S,
            late=late,
            heirs=self.heirs,
        )
        if finished.returncode:
            raise EnvironmentLoadError(f"{failure}. uv said:\n{finished.stderr.strip()}")
        return finished.stdout

    def run_cache_first(self, arguments: Sequence[str], *, failure: str) -> str:
        """Run uv as `run` does, but use the network only if uv's cache lacks something."""
        if self.wheels is None and not self.offline:
            try:
                return self.run([*arguments, "--offline"], failure=failure)
            except EnvironmentLoadError:
                pass
        return self.run(arguments, failure=failure)

    def _options(self) -> list[str]:
        if self.wheels is not None:
            found = str(self.wheels.absolute())
            return ["--offline", "--no-config", "--no-index", "--find-links", found]
        return [*config_options(os.environ), *(("--offline",) if self.offline else ())]


def packages_folder() -> Path:
    """Return the folder of dependencies' wheels from bundles, kept for later use offline."""
    return data_folder() / "cache" / "packages"


def brought_wheels_folder(sha256: str) -> Path:
    """Return the folder for the wheel with this hash, alone: equal names may hide other bytes."""
    return packages_folder() / sha256


def brought_wheels(lines: Iterable[str]) -> list[str]:
    """Return the options of uv that offer it the wheels from bundles that `lines` name by hash.

    Offer them only to install what is locked. Which version is locked is for the package index to
    say: anyone may make a bundle.
    """
    digests = sorted({digest for line in lines for digest in _DIGEST.findall(line)})
    folders = [brought_wheels_folder(digest) for digest in digests]
    return [part for one in folders if one.is_dir() for part in ("--find-links", str(one))]


def missing_requirements(requires_dist: Iterable[str]) -> list[str]:
    """Return the direct and indirect requirements that installed packages do not satisfy."""
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in requires_dist]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            missing.append(_without_marker(requirement))
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            missing.append(_without_marker(requirement))
            continue
        for wanted_extra in requirement.extras or {""}:
            key = (str(canonicalize_name(requirement.name)), wanted_extra)
            if key not in seen:
                seen.add(key)
                pending += [(Requirement(text), wanted_extra) for text in found.requires or []]
    return sorted(set(missing))


def installed_pins() -> list[str]:
    """Return `name==version` of every package this interpreter has.

    They come from the names of folders, because reading every METADATA takes half a second.
    """
    folders = [Path(entry) for entry in sys.path if entry]
    found = [_INFO.fullmatch(path.name) for at in folders for path in at.glob("*.dist-info")]
    return sorted({f"{info['name']}=={info['version']}" for info in found if info is not None})


def install_requirements(
    requirements: Sequence[str], *, needed_by: str, allow_sdist: Sequence[str] = ()
) -> None:
    """Install `requirements` from the package index, without changing an installed version.

    Only `allow_sdist` may be built from source, because that runs their code.
    """
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "installed.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in installed_pins()))
        try:
            _here(
                [
                    *("install", "--constraints", str(constraints), *wheels_only(allow_sdist)),
                    *requirements,
                ],
                failure=f"{needed_by} needs {', '.join(requirements)}, which cannot be installed "
                "alongside the packages that are installed now",
            )
        except EnvironmentLoadError as error:
            raise lacks_wheel(str(error), needed_by) or error from None


def lacks_wheel(said: str, needed_by: str) -> EnvironmentLoadError | None:
    """Return the error to raise where uv `said` that a package has no wheel, else None."""
    found = _NO_WHEEL.search(said)
    if found is None:
        return None
    name = found[1] or found[2]
    return EnvironmentLoadError(
        f"{needed_by} needs {name}, which has no wheel, only source: building it runs its code "
        f"while installing. If you trust it, add --allow-sdist {name}"
    )


def wheels_only(allow_sdist: Sequence[str]) -> list[str]:
    """Return the options of uv and pip that refuse to build anything but `allow_sdist`."""
    exceptions = [part for name in allow_sdist for part in ("--no-binary", name)]
    return ["--only-binary", ":all:", *exceptions]


def is_installed(name: str) -> bool:
    """Whether this interpreter has the distribution `name`, as folders show it now."""
    plain = re.sub(r"[-_.]+", "_", name)
    folders = [Path(entry) for entry in sys.path if entry]
    return any(any(at.glob(f"{plain}-*.dist-info")) for at in folders)


def uninstall_distribution(name: str) -> None:
    """Remove one distribution."""
    _here(["uninstall", name], failure=f"{name} cannot be removed")


def _without_marker(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()


def _here(arguments: Sequence[str], *, failure: str) -> None:
    verb, *rest = arguments
    Uv().run(["pip", verb, "--python", sys.executable, *rest], failure=failure)
