"""Choose the packages for an environment: exact versions and hashes, from one index.

The registry never supplies a dependency, and the index never supplies an environment. Names that
belong to Telescope are refused as dependencies, and the environment's own wheel is installed as a
file.
"""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telescope_core.base.errors import EnvironmentLoadError, RegistryError
from telescope_envs.install.data import brought_wheels
from telescope_envs.install.steps import InstallOptions
from telescope_envs.processes.uv import Uv, installed_pins, lacks_wheel, wheels_only
from telescope_envs.records.lockfile import is_requirement_line
from telescope_envs.records.release import Release

CORE = "telescope-core"
ADAPTERS = "telescope-adapters"
_OWN = frozenset(
    {CORE, ADAPTERS, "telescope-envs", "telescope-train", "telescope-cli", "telescope-ui"}
)
_ENVIRONMENTS = "telescope-env-"


def python_version() -> str:
    """Return the version of this Python as in locks, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def direct_needs(requires_dist: Iterable[str]) -> list[str]:
    """Return the requirements of the virtual environment: telescope-core's and the release's."""
    core = distribution(CORE).requires or []
    return [text for text in [*core, *requires_dist] if _counts(text)]


def check_needs(release: Release) -> None:
    """Raise before any download if `release` requires a package that must not be fetched."""
    for text in release.requires_dist:
        requirement = Requirement(text)
        _require_foreign(requirement.name, release.id)
        is_core = canonicalize_name(requirement.name) == CORE
        if is_core and not requirement.specifier.contains(version(CORE), prereleases=True):
            raise EnvironmentLoadError(
                f"{release.id} {release.version} needs {text}, but this is {CORE} {version(CORE)}; "
                "choose another version of the environment, or of Telescope"
            )


def lock_requirements(release: Release, uv: Uv, *, options: InstallOptions) -> tuple[str, ...]:
    """Return requirement lines with hashes for everything except the wheel of `release`.

    Versions of this interpreter's packages are preferred where they fit, so that their files can be
    shared.
    """
    needs = direct_needs(release.requires_dist)
    with tempfile.TemporaryDirectory() as scratch:
        wanted, chosen = Path(scratch) / "wanted.in", Path(scratch) / "chosen.txt"
        wanted.write_text("".join(f"{text}\n" for text in needs))
        # uv prefers the versions it finds in the file that it is to write.
        chosen.write_text("".join(f"{pin}\n" for pin in installed_pins()))
        arguments = [
            *("pip", "compile", str(wanted), "--output-file", str(chosen), "--quiet"),
            *("--universal", "--python", sys.executable, "--python-version", python_version()),
            *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"),
            "--no-emit-find-links",
        ]
        failure = f"the dependencies of {release.id} {release.version} cannot be locked"
        # From the index, not uv's cache: a cache knows only the hashes of this platform's wheels.
        try:
            uv.run_building(
                lambda built: uv.run([*arguments, *wheels_only(built)], failure=failure),
                options.allow_sdist,
                python=sys.executable,
            )
        except EnvironmentLoadError as error:
            raise _explained(error, release.id, options) from None
        lines = _lines(chosen.read_text(), release.id)
    for line in lines:
        name = line.partition("==")[0]
        _require_foreign(name, release.id)
        if canonicalize_name(name) == CORE:
            raise RegistryError(
                f"a dependency of {release.id} needs {CORE}, which no index may supply; "
                "choose another version of the environment, and tell its author"
            )
    return lines


def install_requirements(
    python: Path, lines: Sequence[str], uv: Uv, *, needed_by: str, options: InstallOptions
) -> None:
    """Install exactly `lines` for `python`, checking hashes."""
    if not lines:
        return
    for line in lines:
        assert is_requirement_line(line), f"a lock was read without its checks: {line!r}"
        name = line.partition("==")[0]
        _require_foreign(name, needed_by)
        if canonicalize_name(name) == CORE:
            raise RegistryError(
                f"{needed_by} is locked with {CORE}, which no index may supply; take the last good "
                "telescope.lock from version control, or install the environment again"
            )
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text("".join(f"{line}\n" for line in lines))
        arguments = [
            *("pip", "install", "--python", str(python), "--quiet"),
            *("--require-hashes", "--no-deps"),
            *("--requirements", str(listed)),
            *(brought_wheels(lines) if options.offline and options.wheels is None else ()),
        ]
        failure = f"the dependencies of {needed_by} cannot be installed"
        try:
            uv.run_building(
                lambda built: uv.run_cache_first(
                    [*arguments, *wheels_only(built)], failure=failure
                ),
                options.allow_sdist,
            )
        except EnvironmentLoadError as error:
            raise _explained(error, needed_by, options) from None


def serve(lines: Iterable[str], needs: Iterable[str]) -> bool:
    """Return whether locked `lines` satisfy every requirement in `needs` on this platform."""
    locked = [Requirement(line.partition(" --hash")[0]) for line in lines]
    pins = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in locked
        if pin.marker is None or pin.marker.evaluate()
    }
    for text in needs:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version_here = pins.get(canonicalize_name(requirement.name))
        if version_here is None:
            return False
        if not requirement.specifier.contains(version_here, prereleases=True):
            return False
    return True


def _counts(text: str) -> bool:
    """Return whether a requirement counts: not telescope-core, and not only for an extra."""
    requirement = Requirement(text)
    return canonicalize_name(requirement.name) != CORE and "extra ==" not in str(requirement.marker)


def _lines(text: str, needed_by: str) -> tuple[str, ...]:
    joined = text.replace("\\\n", " ").splitlines()
    lines = [" ".join(line.split()) for line in joined if line.strip()]
    for line in lines:
        if not is_requirement_line(line):
            raise EnvironmentLoadError(
                f"the dependencies of {needed_by} cannot be locked: expected name==version with "
                f"hashes, got {line.partition(' --hash')[0]!r}; it must come from a package index"
            )
    return tuple(sorted(lines))


def _require_foreign(name: str, needed_by: str) -> None:
    plain = str(canonicalize_name(name))
    if plain.startswith(_ENVIRONMENTS) or (plain in _OWN and plain != CORE):
        raise RegistryError(
            f"{needed_by} depends on {name!r}, a name that belongs to Telescope: a package index "
            "may not supply it. An environment may depend on telescope-core and on packages of "
            "the package index; choose another version of it, and tell its author"
        )


def _explained(
    error: EnvironmentLoadError, needed_by: str, options: InstallOptions
) -> EnvironmentLoadError:
    """Return the error with advice that fits uv's message."""
    text = str(error)
    no_wheel = lacks_wheel(text, needed_by)
    if no_wheel is not None:
        return no_wheel
    if options.wheels is not None:
        return EnvironmentLoadError(f"{text}\nthe bundle lacks it; make it again on this platform")
    if options.offline and options.reinstall:
        return EnvironmentLoadError(
            f"{text}\n--reinstall takes nothing from uv's cache, and --offline nothing from the "
            "network; leave one of them out"
        )
    if options.offline:
        return EnvironmentLoadError(
            f"{text}\n--offline uses only caches; run it once with a network, or use a bundle"
        )
    return error
