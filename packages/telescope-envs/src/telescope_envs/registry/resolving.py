"""From what a person typed to one release: `name`, `owner/name`, `owner/name@specifier`.

A release is chosen only where it can run: the Python and the environment protocol of this
interpreter. Nothing is downloaded here.
`registry:` before it names the registry: `lookup.locate_release` opens that one.
"""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from telescope_core.errors import ConfigError, RegistryError, unknown_name
from telescope_core.protocol_versions import PROTOCOL_MAX, PROTOCOL_MIN
from telescope_envs.registry.records import Release, Status
from telescope_envs.registry.registry import Registry

_REQUEST = re.compile(
    r"(?:(?P<registry>[a-z][a-z0-9-]*):)?(?:(?P<owner>[a-z0-9-]+)/)?(?P<name>[a-z0-9-]+)"
    r"(?:@(?P<wanted>.+))?"
)
_DIGEST = "sha256:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed, taken apart."""

    registry: str = ""
    """Name of the registry that it is in; empty = the default one."""
    owner: str
    """Empty for a bare name."""
    name: str
    wanted: str
    """PEP 440 specifier, or `sha256:` and the digest of the wheel; empty = the newest release."""

    @property
    def typed_id(self) -> str:
        """The name without the registry and the version."""
        return f"{self.owner}/{self.name}" if self.owner else self.name


def parse_request(text: str) -> Request:
    """Take `[registry:][owner/]name[@version]` apart; raises ConfigError for anything else."""
    found = _REQUEST.fullmatch(text)
    if not found:
        raise ConfigError(
            f"environment {text!r} must be written name, owner/name or owner/name@version, in "
            "lower-case letters, digits and hyphens; registry: may stand before it"
        )
    wanted = found["wanted"] or ""
    if wanted.startswith(_DIGEST):
        _check_digest(wanted)
    else:
        _specifier(wanted)
    return Request(
        registry=found["registry"] or "",
        owner=found["owner"] or "",
        name=found["name"],
        wanted=wanted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The release that was asked for, and what a person should know before using it."""

    release: Release
    warnings: tuple[str, ...]


def resolve(registry: Registry, text: str) -> Release:
    """Return the release that `text` asks for: the newest that fits, is not yanked and can run."""
    return resolve_with_warnings(registry, text).release


def resolve_with_warnings(registry: Registry, text: str) -> Resolution:
    """Return the release that `text` asks for, with what has been said against it since."""
    request = parse_request(text)
    environment_id = resolve_id(registry, request)
    _check_namespace(registry, environment_id)
    fitting = _fitting(registry.releases(environment_id), request, environment_id)
    status = registry.status(environment_id)
    usable = [
        release
        for release in fitting
        if _is_exact(request.wanted) or release.version not in status.yanked
    ]
    if not usable:
        newest = fitting[-1].version
        raise RegistryError(
            f"{environment_id} {newest} is yanked: {status.yanked[newest]}; choose another "
            f"version, or name this one exactly: {environment_id}@{newest}"
        )
    release, skipped = _newest_that_runs(usable)
    return Resolution(release=release, warnings=(*skipped, *_said_against(release, status)))


def resolve_id(registry: Registry, request: Request) -> str:
    """Return owner/name; a bare name must be an alias of this registry."""
    aliases = {} if request.owner else registry.aliases()
    environment_id = request.typed_id if request.owner else aliases.get(request.name, "")
    if not environment_id or not registry.has(environment_id):
        known = {*registry.ids(), *registry.aliases()}
        hint = f"(registry {registry.address})"
        raise unknown_name("environment", request.typed_id, known, hint)
    return environment_id


def matches(version: str, wanted: str, sha256: str = "") -> bool:
    """Whether a release is what `wanted` asks for, by its version or its wheel's `sha256`."""
    if wanted.startswith(_DIGEST):
        return wanted == f"{_DIGEST}{sha256}"
    return not wanted or _specifier(wanted).contains(version, prereleases=True)


def _check_namespace(registry: Registry, environment_id: str) -> None:
    owner = environment_id.partition("/")[0]
    namespace = registry.namespace(owner)
    if namespace is None:
        raise RegistryError(
            f"{environment_id}: registry {registry.address} has no namespaces/{owner}.toml, so "
            "nobody answers for it; tell the registry's keepers"
        )
    if namespace.status == "suspended":
        raise RegistryError(
            f"{environment_id}: namespace {owner!r} is suspended, so nothing of it is installed; "
            "ask the keepers of the registry why"
        )


def _fitting(releases: Sequence[Release], request: Request, environment_id: str) -> list[Release]:
    wanted = request.wanted
    fitting = [release for release in releases if _fits(release, wanted)]
    if not fitting and not wanted:
        fitting = list(releases)
    if not fitting:
        known = ", ".join(release.version for release in releases) or "none"
        what = "wheel with" if wanted.startswith(_DIGEST) else "version"
        raise RegistryError(
            f"{environment_id} has no {what} {wanted!r}; published versions: {known}"
        )
    return fitting


def _fits(release: Release, wanted: str) -> bool:
    """Whether the release may be chosen: previews only where the wish itself names one."""
    if wanted.startswith(_DIGEST):
        return matches(release.version, wanted, release.wheel.sha256)
    specifier = _specifier(wanted)
    return specifier.contains(release.version, prereleases=bool(specifier.prereleases))


def _newest_that_runs(releases: Sequence[Release]) -> tuple[Release, list[str]]:
    """Return the newest release that runs here, and why newer ones were passed over."""
    skipped: list[str] = []
    for release in reversed(releases):
        obstacle = _obstacle(release)
        if not obstacle:
            return release, skipped
        skipped.append(obstacle)
    raise RegistryError(skipped[0])


def _obstacle(release: Release) -> str:
    """Return what keeps the release from running here, and what to do; empty = nothing."""
    named = f"{release.id} {release.version}"
    python = platform.python_version()
    if not SpecifierSet(release.requires_python).contains(python, prereleases=True):
        return f"{named} needs Python {release.requires_python}, this is {python}; use another"
    lowest, highest = release.protocol.bounds
    spoken = f"{release.protocol.minimum} to {release.protocol.maximum}"
    here = (
        f"telescope-core {version_of('telescope-core')} speaks {PROTOCOL_MIN}.0 to {PROTOCOL_MAX}.0"
    )
    if lowest > (PROTOCOL_MAX, 0):
        return f"{named} speaks environment protocol {spoken}, {here}; upgrade telescope-core"
    if highest < (PROTOCOL_MIN, 0):
        return (
            f"{named} speaks environment protocol {spoken}, {here}; it is too old for this "
            "telescope-core: choose a newer version of it, or ask its publisher for one"
        )
    return ""


def _said_against(release: Release, status: Status) -> list[str]:
    """Return what the status record says that whoever uses the release should know."""
    warnings: list[str] = []
    if release.version in status.yanked:
        why = status.yanked[release.version]
        warnings.append(f"{release.id} {release.version} is yanked: {why}")
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        warnings.append(f"{release.id} is deprecated: {status.deprecated.reason}{instead}")
    return [*warnings, *(f"{release.id}: advisory: {text}" for text in status.advisories)]


def _is_exact(wanted: str) -> bool:
    return wanted.startswith(_DIGEST) or _exact_version(wanted) is not None


def _exact_version(wanted: str) -> Version | None:
    try:
        return Version(wanted.removeprefix("=="))
    except InvalidVersion:
        return None


def _check_digest(wanted: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", wanted.removeprefix(_DIGEST)):
        raise ConfigError(
            f"{wanted!r} must be {_DIGEST} and all 64 hexadecimal digits of the wheel's digest; "
            "telescope env info NAME prints it"
        )


def _specifier(wanted: str) -> SpecifierSet:
    exact = _exact_version(wanted)
    try:
        return SpecifierSet(f"=={exact}" if exact is not None else wanted)
    except InvalidSpecifier as error:
        raise ConfigError(
            f"version {wanted!r} is not understood; write an exact version such as 0.1.0 or a "
            "range such as '>=0.1,<0.2'"
        ) from error
