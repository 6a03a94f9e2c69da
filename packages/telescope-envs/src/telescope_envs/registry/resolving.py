"""Resolves what a user typed (`name`, `owner/name`, `owner/name@specifier`) to one release.

Only a release that supports this interpreter's Python and environment protocol is chosen. Nothing
is downloaded here. A prefix `registry:` names the registry, which `lookup.locate_release` opens.

An update is planned here too. A new major version means different tasks or rewards, so it is chosen
only on request: scores from before would not be comparable with scores after it.
"""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from telescope_core.base.errors import ConfigError, RegistryError, UnknownNameError, unknown_name
from telescope_core.base.protocols import PROTOCOL_MAX, PROTOCOL_MIN
from telescope_envs.records.changes import changes_between, is_major_step
from telescope_envs.records.installed import version_of
from telescope_envs.records.release import Namespace, Release, Status
from telescope_envs.registry.config import parse_address, read_user_config
from telescope_envs.registry.registry import Registry

_REQUEST = re.compile(
    r"(?:(?P<registry>[a-z][a-z0-9-]*):)?(?:(?P<owner>[a-z0-9-]+)/)?(?P<name>[a-z0-9-]+)"
    r"(?:@(?P<wanted>.+))?"
)
_DIGEST = "sha256:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A parsed request."""

    registry: str = ""
    """Name of its registry; empty for the default one."""
    owner: str
    """Empty for a bare name."""
    name: str
    wanted: str
    """PEP 440 specifier, or `sha256:` and the wheel's digest; empty for the newest release."""

    @property
    def is_exact(self) -> bool:
        """Whether it asks for one version or one wheel."""
        return self.wanted.startswith(_DIGEST) or self.exact_version is not None

    @property
    def exact_version(self) -> Version | None:
        """The only version that it asks for; None if it asks for several, or for a wheel."""
        return _exact_version(self.wanted)

    @property
    def typed_id(self) -> str:
        """The name without the registry and the version."""
        return f"{self.owner}/{self.name}" if self.owner else self.name

    def fits(self, environment_id: str, registry: str) -> bool:
        """Return whether it means owner/name from the registry at the address `registry`.

        The address is empty if it came from none; then only a request without a registry fits.
        """
        if self.typed_id not in (environment_id, environment_id.rpartition("/")[2]):
            return False
        if not self.registry:
            return True
        return bool(registry) and self.registry in read_user_config().names_of(
            parse_address(registry)
        )


def parse_request(text: str) -> Request:
    """Parse `[registry:][owner/]name[@version]`; raises ConfigError for anything else."""
    found = _REQUEST.fullmatch(text)
    if not found:
        raise ConfigError(
            f"environment {text!r} must be written name, owner/name or owner/name@version, in "
            "lower-case letters, digits and hyphens; it may begin with registry:"
        )
    wanted = found["wanted"] or ""
    if not wanted.startswith(_DIGEST):
        _specifier(wanted)
    elif not re.fullmatch(r"[0-9a-f]{64}", wanted.removeprefix(_DIGEST)):
        raise ConfigError(
            f"{wanted!r} must be {_DIGEST} and all 64 hexadecimal digits of the wheel's digest; "
            "telescope env info NAME prints it"
        )
    return Request(
        registry=found["registry"] or "",
        owner=found["owner"] or "",
        name=found["name"],
        wanted=wanted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The release that a request resolves to, with warnings for the user."""

    release: Release
    status: Status
    warnings: tuple[str, ...]


def resolve(registry: Registry, text: str) -> Release:
    """Return the newest release that matches the request, is not yanked and runs here.

    A yanked release is returned only if the request names exactly that release. A request without a
    version means a pre-release only if no final release is left that is not yanked.
    """
    return resolve_with_warnings(registry, text).release


def resolve_with_warnings(
    registry: Registry, text: str, *, allows_yanked: bool = False
) -> Resolution:
    """Return the release as `resolve` does, with warnings from its status record.

    The warnings also say why newer releases that do not run here were skipped. With
    `allows_yanked`, the newest one is returned if all that match are yanked.
    """
    request = parse_request(text)
    environment_id = resolve_id(registry, request)
    suspended = _check_namespace(registry, environment_id)
    releases = registry.releases(environment_id)
    status = registry.status(environment_id)
    try:
        fitting = _fitting(releases, request, environment_id, status)
    except RegistryError as error:
        raise _explained(error, registry, environment_id, request.wanted) from None
    usable = [
        release for release in fitting if request.is_exact or release.version not in status.yanked
    ]
    if not usable and not allows_yanked:
        newest = fitting[-1].version
        left = ", ".join(one.version for one in releases if one.version not in status.yanked)
        advice = (
            f"choose one that is not yanked ({left}), or"
            if left
            else "no version is left that is not yanked; to use it all the same,"
        )
        raise RegistryError(
            f"{environment_id} {newest} is yanked: {status.yanked[newest]}; {advice} name this "
            f"one exactly: {environment_id}@{newest}"
        )
    release, skipped = _newest_that_runs(usable or fitting)
    warnings = (*skipped, *suspended, *_said_against(environment_id, release.version, status))
    return Resolution(release=release, status=status, warnings=warnings)


def resolve_id(registry: Registry, request: Request) -> str:
    """Return owner/name. A bare name is an alias of this registry.

    If the request names its registry, a bare name may also be the name of the only environment
    there that is called so.
    """
    aliases = {} if request.owner else registry.aliases()
    environment_id = request.typed_id if request.owner else aliases.get(request.name, "")
    if not environment_id and request.registry:
        environment_id = _only_one_named(registry, request)
    if not environment_id or not registry.has(environment_id):
        published = set(registry.ids())
        aliased = {alias for alias, target in registry.aliases().items() if target in published}
        if not request.owner and environment_id:
            raise UnknownNameError(
                f"{request.name!r} means {environment_id} in registry {registry.address}, which "
                "has no release of it; tell the registry's maintainers"
            )
        known = published | aliased
        hint = f"(registry {registry.address})"
        hint += "".join(f"; {line}" for line in removals(registry, environment_id, request.wanted))
        raise unknown_name("environment", request.typed_id, known, hint)
    return environment_id


def removals(registry: Registry, environment_id: str, wanted: str = "") -> list[str]:
    """Return why those releases that match `wanted` were taken down, one line each."""
    return [
        f"{one.id} {one.version} is removed: {one.reason}"
        for one in registry.removed
        if one.id == environment_id and matches(one.version, wanted, one.sha256)
    ]


def _only_one_named(registry: Registry, request: Request) -> str:
    """Return the only owner/name with the bare name that is asked for; empty if there is none."""
    found = [one for one in registry.ids() if one.partition("/")[2] == request.name]
    if len(found) > 1:
        choices = ", ".join(f"{request.registry}:{one}" for one in found)
        raise ConfigError(
            f"{request.name!r} is the name of {len(found)} environments in registry "
            f"{registry.address}: {choices}; use one of these names"
        )
    return found[0] if found else ""


def matches(version: str, wanted: str, sha256: str = "") -> bool:
    """Whether a release's version, or its wheel's `sha256`, matches `wanted`."""
    if wanted.startswith(_DIGEST):
        return wanted == f"{_DIGEST}{sha256}"
    return not wanted or _specifier(wanted).contains(version, prereleases=True)


def _check_namespace(registry: Registry, environment_id: str) -> list[str]:
    """Return a warning if the owner is suspended; RegistryError if its releases are withheld."""
    owner = environment_id.partition("/")[0]
    namespace = registry.namespace(owner)
    if namespace is None:
        raise RegistryError(
            f"{environment_id}: registry {registry.address} has no namespaces/{owner}.toml, so "
            "nobody is responsible for it; tell the registry's maintainers"
        )
    if namespace.is_withheld:
        raise RegistryError(
            f"{environment_id}: namespace {owner!r} is suspended, so its environments cannot be "
            "installed; ask the registry's maintainers why"
        )
    return _suspended(environment_id, namespace)


def _suspended(environment_id: str, namespace: Namespace | None) -> list[str]:
    owner = environment_id.partition("/")[0]
    if namespace is None:
        return [f"{environment_id}: the registry has no namespace {owner!r} any more"]
    withheld = ", and nothing of it is newly installed" if namespace.is_withheld else ""
    what = f"{environment_id}: namespace {owner!r} is suspended: it publishes nothing new{withheld}"
    return [what] if namespace.status == "suspended" else []


def notices(registry: Registry, environment_id: str, version: str) -> list[str]:
    """Return the warnings of `registry` about a version, one line each.

    The version may be removed or yanked, its environment deprecated or with advisories, its owner
    suspended.
    """
    namespace = registry.namespace(environment_id.partition("/")[0])
    status = registry.status(environment_id)
    return [
        *removals(registry, environment_id, version),
        *_suspended(environment_id, namespace),
        *_said_against(environment_id, version, status),
    ]


def _fitting(
    releases: Sequence[Release], request: Request, environment_id: str, status: Status
) -> list[Release]:
    wanted = request.wanted
    if not wanted:
        # In the order of `newest_version`, which shows what is chosen here.
        releases = [one for one in releases if one.version not in status.yanked] or releases
    fitting = [release for release in releases if _fits(release, wanted)]
    if not wanted:
        fitting = fitting or list(releases)
    if not fitting and not wanted:
        raise RegistryError(f"{environment_id} has no release that can be read")
    if not fitting:
        known = ", ".join(release.version for release in releases) or "none"
        what = "wheel with" if wanted.startswith(_DIGEST) else "version"
        raise RegistryError(
            f"{environment_id} has no {what} {wanted!r}; published versions: {known}"
        )
    return fitting


def _explained(
    error: RegistryError, registry: Registry, environment_id: str, wanted: str
) -> RegistryError:
    """Return `error`, naming what was removed, or cannot be read, and may be what is `wanted`."""
    error = RegistryError("; ".join([str(error), *removals(registry, environment_id, wanted)]))
    unreadable = registry.read_releases(environment_id).unreadable
    if not unreadable:
        return error
    count = f"{len(unreadable)} of its index lines cannot be read"
    return RegistryError(f"{error}; {count}, the first because of this: {unreadable[0].why}")


def _fits(release: Release, wanted: str) -> bool:
    """Return whether the release matches `wanted`; a pre-release only if `wanted` names one."""
    if wanted.startswith(_DIGEST):
        return matches(release.version, wanted, release.wheel.sha256)
    specifier = _specifier(wanted)
    return specifier.contains(release.version, prereleases=bool(specifier.prereleases))


def _newest_that_runs(releases: Sequence[Release]) -> tuple[Release, list[str]]:
    """Return the newest release that runs here, and the reasons against newer ones."""
    skipped: list[str] = []
    for release in reversed(releases):
        obstacle = _obstacle(release)
        if not obstacle:
            return release, skipped
        skipped.append(obstacle)
    raise RegistryError(skipped[0])


def _obstacle(release: Release) -> str:
    """Return the reason why the release cannot run here, with advice; empty if it can."""
    named = f"{release.id} {release.version}"
    python = platform.python_version()
    if not SpecifierSet(release.requires_python).contains(python, prereleases=True):
        return (
            f"{named} needs Python {release.requires_python}, but this is Python {python}; use "
            "another Python"
        )
    lowest, highest = release.protocol.bounds
    spoken = f"{release.protocol.minimum} to {release.protocol.maximum}"
    here = (
        f"telescope-core {version_of('telescope-core')} speaks {PROTOCOL_MIN}.0 to {PROTOCOL_MAX}.0"
    )
    if lowest > (PROTOCOL_MAX, 0):
        return f"{named} speaks environment protocol {spoken}, but {here}; upgrade telescope-core"
    if highest < (PROTOCOL_MIN, 0):
        return (
            f"{named} speaks environment protocol {spoken}, but {here}; it is too old for this "
            "telescope-core: choose a newer version of it, or ask its publisher for one"
        )
    return ""


def _said_against(environment_id: str, version: str, status: Status) -> list[str]:
    """Return the warnings in the status record that concern users of the version."""
    warnings: list[str] = []
    if version in status.yanked:
        warnings.append(f"{environment_id} {version} is yanked: {status.yanked[version]}")
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        warnings.append(f"{environment_id} is deprecated: {status.deprecated.reason}{instead}")
    return [*warnings, *(f"{environment_id}: advisory: {text}" for text in status.advisories)]


def _exact_version(wanted: str) -> Version | None:
    try:
        return Version(wanted.removeprefix("=="))
    except ValueError:
        return None


def _specifier(wanted: str) -> SpecifierSet:
    exact = _exact_version(wanted)
    try:
        found = SpecifierSet(f"=={exact}" if exact is not None else wanted)
        found.contains("1.0")  # which fails for numbers that are too long to read
        return found
    except ValueError as error:
        raise ConfigError(
            f"version {wanted[:80]!r} is not valid; write an exact version such as 0.1.0 or a "
            "range such as '>=0.1,<0.2'"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Plan for updating one environment."""

    before: Release
    after: Release | None
    """None if the environment stays as it is."""
    refused: str
    """A release that was not chosen, with the reason; empty if there is none."""
    warnings: tuple[str, ...]
    """Warnings of the registry about the release that is chosen or kept."""

    @property
    def changes(self) -> tuple[str, ...]:
        """The differences besides the code, one line each."""
        return tuple(map(str, changes_between(self.before, self.after))) if self.after else ()


def plan_update(registry: Registry, before: Release, *, allow_major: bool) -> UpdatePlan:
    """Plan an update to the newest release that fits; `registry` is where `before` came from."""
    after, refused = _chosen(registry, before, allow_major=allow_major)
    version = (after or before).version
    return UpdatePlan(
        before=before,
        after=after,
        refused=refused,
        warnings=tuple(notices(registry, before.id, version)),
    )


def _chosen(
    registry: Registry, before: Release, *, allow_major: bool
) -> tuple[Release | None, str]:
    """Return the release to update to, and the reason against another one."""
    newest = resolve(registry, before.id)
    if is_major_step(before.version, newest.version) and not allow_major:
        below = Version(before.version).major + 1
        try:
            newer = resolve(registry, f"{before.id}@>{before.version},<{below}")
        except RegistryError:  # no newer release of that major version runs here and is not yanked
            newer = None
        return newer, (
            f"{newest.version} is a new major version, whose scores are not comparable "
            f"with those of {before.version}; to update to it, add --major"
        )
    if Version(newest.version) < Version(before.version):
        yanked = registry.status(before.id).yanked.get(before.version, "")
        why = f" and {before.version} is yanked: {yanked}" if yanked else ""
        return None, (
            f"{newest.version} is older{why}; to go back, run: telescope env install "
            f"{before.id}@{newest.version}"
        )
    return newest if Version(newest.version) > Version(before.version) else None, ""
