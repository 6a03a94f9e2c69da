"""From what a person typed to one release: `name`, `owner/name`, `owner/name@specifier`."""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from telescope_core.errors import ConfigError, RegistryError, unknown_name
from telescope_envs.registry.records import Release
from telescope_envs.registry.registry import Registry

_REQUEST = re.compile(r"(?:(?P<owner>[a-z0-9-]+)/)?(?P<name>[a-z0-9-]+)(?:@(?P<wanted>.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed, taken apart."""

    owner: str
    """Empty for a bare name."""
    name: str
    wanted: str
    """PEP 440 specifier; empty = the newest release."""

    @property
    def typed_id(self) -> str:
        """The name without the version."""
        return f"{self.owner}/{self.name}" if self.owner else self.name


def parse_request(text: str) -> Request:
    """Take `[owner/]name[@version]` apart; raises ConfigError for anything else."""
    found = _REQUEST.fullmatch(text)
    if not found:
        raise ConfigError(
            f"environment {text!r} must be written name, owner/name or owner/name@version, in "
            "lower-case letters, digits and hyphens"
        )
    wanted = found["wanted"] or ""
    _specifier(wanted)
    return Request(owner=found["owner"] or "", name=found["name"], wanted=wanted)


def resolve(registry: Registry, text: str) -> Release:
    """Return the release that `text` asks for: the newest that fits, is not yanked and can run."""
    request = parse_request(text)
    environment_id = resolve_id(registry, request)
    releases = registry.releases(environment_id)
    fitting = _fitting(releases, request, environment_id)
    yanked = registry.status(environment_id).yanked
    is_exact = _exact_version(request.wanted) is not None
    usable = [release for release in fitting if is_exact or release.version not in yanked]
    if not usable:
        newest = fitting[-1].version
        raise RegistryError(
            f"{environment_id} {newest} is yanked: {yanked[newest]}; choose another version, or "
            f"name this one exactly: {environment_id}@{newest}"
        )
    return _runs_here(usable, environment_id)


def resolve_id(registry: Registry, request: Request) -> str:
    """Return owner/name; a bare name must be an alias of this registry."""
    ids, aliases = registry.ids(), registry.aliases()
    environment_id = request.typed_id if request.owner else aliases.get(request.name, "")
    if environment_id not in ids:
        hint = f"(registry {registry.address})"
        raise unknown_name("environment", request.typed_id, {*ids, *aliases}, hint)
    return environment_id


def matches(version: str, wanted: str) -> bool:
    """Whether `version` is what `wanted` asks for; an empty wish takes any."""
    return not wanted or _specifier(wanted).contains(version, prereleases=True)


def _fitting(releases: Sequence[Release], request: Request, environment_id: str) -> list[Release]:
    specifier = _specifier(request.wanted)
    allows_previews = bool(specifier.prereleases)
    fitting = [
        release
        for release in releases
        if specifier.contains(release.version, prereleases=allows_previews)
    ]
    if not fitting and not request.wanted:
        fitting = list(releases)
    if not fitting:
        known = ", ".join(release.version for release in releases) or "none"
        raise RegistryError(
            f"{environment_id} has no version {request.wanted!r}; published versions: {known}"
        )
    return fitting


def _runs_here(releases: Sequence[Release], environment_id: str) -> Release:
    python = platform.python_version()
    for release in reversed(releases):
        if SpecifierSet(release.requires_python).contains(python, prereleases=True):
            return release
    raise RegistryError(
        f"{environment_id} {releases[-1].version} needs Python {releases[-1].requires_python}, "
        f"this is {python}; use another Python"
    )


def _exact_version(wanted: str) -> Version | None:
    try:
        return Version(wanted.removeprefix("=="))
    except InvalidVersion:
        return None


def _specifier(wanted: str) -> SpecifierSet:
    exact = _exact_version(wanted)
    try:
        return SpecifierSet(f"=={exact}" if exact is not None else wanted)
    except InvalidSpecifier as error:
        raise ConfigError(
            f"version {wanted!r} is not understood; write an exact version such as 0.1.0 or a "
            "range such as '>=0.1,<0.2'"
        ) from error
