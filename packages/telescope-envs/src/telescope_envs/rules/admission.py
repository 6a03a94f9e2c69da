"""Rules of publishing, in one place for stores, pushes, servers and checks.

The registry is read through a function that maps a path to bytes, so folders, repositories and
servers share this. A store takes its lock, or fixes its parent commit, before the first read.
"""

from collections.abc import Callable, Iterable, Iterator

from packaging.utils import canonicalize_name
from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_envs.records.names import (
    distribution_name,
    is_version,
    module_name,
    near_names,
    parse_reserved,
    same_distribution_ids,
)
from telescope_envs.records.reading import (
    REMOVED_PATH,
    Publication,
    check_bytes,
    parse_namespace_of,
    parse_record,
    parse_removals,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import RegistryConfig, Release, Status

Read = Callable[[str], bytes | None]
"""Maps a path relative to the registry to the file's bytes; None when there is no such file."""


def is_new(read: Read, publication: Publication) -> bool:
    """Return True if `publication` must be stored, False if the same wheel is already published.

    Raises RegistryError when it must not be published: a record that no reader would accept, a bad
    name, a namespace that may not publish, bytes that do not match the record, or a different wheel
    under the same version.
    """
    release = publication.release
    check_readable(release)
    for field, wanted, got in misnamed(release):
        raise RegistryError(f"{release.id}: {field} must be {wanted!r}, got {got!r}")
    check_bytes(publication.wheel, release)
    require_namespace(read, release.owner)
    require_unreserved(read, release.id)
    require_not_removed(read, release.id, release.version)
    for other in same_distribution_ids(release.id):
        if read(f"index/{other}.jsonl") is not None:
            raise RegistryError(
                f"{release.id} would use the distribution name {release.distribution}, which "
                f"{other} already uses; choose another name"
            )
    return not is_published(read, release.id, release.version, release.wheel.sha256)


def is_published(read: Read, environment_id: str, version: str, sha256: str) -> bool:
    """Return whether that version is published; RegistryError if it is, with another wheel."""
    digest = published_sha256(read, environment_id, version)
    if digest is not None and digest != sha256:
        raise RegistryError(
            f"{environment_id} {version} is already published with different bytes (sha256 "
            f"{digest[:12]}..., this is {sha256[:12]}...); releases are never replaced: raise "
            "the version with telescope env push --bump patch"
        )
    return digest is not None


def published_sha256(read: Read, environment_id: str, version: str) -> str | None:
    """Return the digest of the wheel that is published as `version`; None if none is."""
    published = published_versions(read, environment_id)
    same = (digest for known, digest in published.items() if Version(known) == Version(version))
    return next(same, None)


def published_versions(read: Read, environment_id: str) -> dict[str, str]:
    """Return the digest of the wheel of each version in the environment's index file.

    Lines that readers skip are included, because a published version is never published again.
    Raises RegistryError for a line that does not even state its version.
    """
    path = f"index/{environment_id}.jsonl"
    found = read_releases(read(path) or b"", environment_id, path)
    for line in found.unreadable:
        if not is_version(line.version):
            raise RegistryError(f"{line.why}. Nothing can be published after such a line")
    stated = [(line.version, line.sha256) for line in found.unreadable]
    return dict([*stated, *((one.version, one.wheel.sha256) for one in found.releases)])


def changed_status(
    read: Read, environment_id: str, change: Callable[[Status], Status]
) -> tuple[Status, bytes]:
    """Return the status record that `change` produces, and the bytes of its file.

    Raises RegistryError for an environment that is not published, and for a version that is yanked
    now and was never published. A version that was yanked before may have been taken down since.
    """
    versions = list(published_versions(read, environment_id))
    if not versions:
        raise RegistryError(
            f"{environment_id} has no published version; publish it before changing its status"
        )
    path = f"status/{environment_id}.json"
    before = parse_status(read(path), path)
    status = change(before)
    unknown = sorted(set(status.yanked) - set(before.yanked) - set(versions))
    if unknown:
        raise RegistryError(
            f"cannot yank {', '.join(unknown)}: {environment_id} has no such version; "
            f"published versions: {', '.join(versions)}"
        )
    record = status_file(status)
    if parse_status(record, f"the new {path}") != status:
        raise RegistryError(f"the new {path} would be read differently than it is; correct it")
    return status, record


def status_file(status: Status) -> bytes:
    """Return the bytes of a status record's file."""
    return status.as_json(indent=2) + b"\n"


def index_line(release: Release) -> bytes:
    """Return the line of a release in its index file, including the newline."""
    return release.as_json() + b"\n"


def check_readable(release: Release) -> None:
    """Raise RegistryError unless readers of the registry will read this very record.

    Records made in a program, rather than read, may hold values that their own rules refuse.
    """
    line = index_line(release)
    where = f"the record of {release.id} {release.version}"
    try:
        is_same = parse_record(Release, line, where) == release
    except RegistryError as error:
        advice = "; update the registry"
        raise RegistryError(f"{str(error).removesuffix(advice)}; correct the record") from None
    if not is_same:
        raise RegistryError(f"{where} would be read differently than it is; correct the record")


def misnamed(release: Release) -> Iterator[tuple[str, str, str]]:
    """Yield each field that does not follow from owner, name and version: it, wanted and got."""
    module = module_name(release.owner, release.name)
    wanted = {
        "distribution": (distribution_name(release.owner, release.name), release.distribution),
        "module": (module, release.module),
        "wheel.filename": (
            f"{module}-{release.version}-py3-none-any.whl",
            release.wheel.filename,
        ),
    }
    for field, (expected, got) in wanted.items():
        if expected != got:
            yield field, expected, got


def require_namespace(read: Read, owner: str) -> None:
    """Raise RegistryError unless the registry has an active namespace for `owner`."""
    path = f"namespaces/{owner}.toml"
    found = read(path)
    if found is None:
        raise RegistryError(
            f"nobody may publish as {owner!r}: the registry has no {path}; publish under an owner "
            "that you own, or ask the registry's maintainers to add this one"
        )
    namespace = parse_namespace_of(owner, found, path)
    if namespace.status == "suspended":
        raise RegistryError(
            f"namespace {owner!r} is suspended: nothing can be published in it; "
            "ask the registry's maintainers why"
        )


def reserved_parts(read: Read, *names: str) -> list[str]:
    """Return those of `names` that the registry reserves; its own name is not reserved for it."""
    config = parse_record(RegistryConfig, read("config.json") or b"", "config.json")
    reserved = parse_reserved(read("reserved.txt") or b"")
    return [name for name in names if canonicalize_name(name) in reserved and name != config.name]


def require_unreserved(read: Read, environment_id: str) -> None:
    """Raise RegistryError when the owner or the name is reserved."""
    for name in reserved_parts(read, *environment_id.split("/")):
        raise RegistryError(
            f"{name!r} is a reserved name of this registry (reserved.txt), so {environment_id} "
            "cannot be published; choose another name"
        )


def require_not_removed(read: Read, environment_id: str, version: str) -> None:
    """Raise RegistryError for a version that was removed, which never comes back."""
    for one in parse_removals(read(REMOVED_PATH)).removed:
        if one.id == environment_id and Version(one.version) == Version(version):
            raise RegistryError(
                f"{environment_id} {version} was removed from this registry ({one.reason}), "
                "and a version is never published again; raise the version in its pyproject.toml"
            )


def near_ids(environment_id: str, known: Iterable[str], aliases: Iterable[str] = ()) -> list[str]:
    """Return the names in `known` ids, and aliases, that people may confuse with a new id's.

    If its owner is new too, owners are compared with owners.
    """
    owner, _, name = environment_id.partition("/")
    ids = [one.partition("/") for one in known]
    near = near_names(name, {*(one[2] for one in ids), *aliases})
    owners = {one[0] for one in ids}
    return near if owner in owners else near + near_names(owner, owners)
