"""Checks that every store makes before it publishes a release or changes a status.

They read the registry through a function that maps a path to bytes, so folders, repositories and
servers share them. A store takes its lock, or fixes its parent commit, before the first read.
"""

from collections.abc import Callable

from packaging.version import Version

from telescope_core.errors import RegistryError
from telescope_envs.records.names import (
    check_name,
    check_owner,
    check_version,
    distribution_name,
    is_version,
    module_name,
    parse_reserved,
    plain,
    same_distribution_ids,
)
from telescope_envs.records.publication import Publication
from telescope_envs.records.reading import (
    parse_namespace_of,
    parse_record,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import (
    RegistryConfig,
    Release,
    Status,
)
from telescope_envs.rules.wheel import check_bytes

Read = Callable[[str], bytes | None]
"""Maps a path relative to the registry to the file's bytes; None when there is no such file."""


def is_new(read: Read, publication: Publication) -> bool:
    """Return True if `publication` must be stored, False if the same wheel is already published.

    Raises RegistryError when it must not be published: a record that no reader would accept, a bad
    name, a namespace that may not publish, bytes that do not match the record, or a different wheel
    under the same version.
    """
    release = publication.release
    _check_record(publication)
    _check_owner_may_publish(read, release.owner)
    _check_name_is_free(read, release)
    for version, sha256 in published_versions(read, release.id).items():
        if Version(version) == Version(release.version):
            if sha256 == release.wheel.sha256:
                return False
            raise RegistryError(
                f"{release.id} {version} is already published with different bytes; releases "
                "are never replaced: raise the version in its pyproject.toml"
            )
    return True


def published_versions(read: Read, environment_id: str) -> dict[str, str]:
    """Return version -> digest of the wheel, of every line of the environment's index file.

    Lines that readers skip count, because a published version is never published again. Raises
    RegistryError for a line that does not even state its version.
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

    Raises RegistryError for an environment or a version that is not published.
    """
    versions = list(published_versions(read, environment_id))
    if not versions:
        raise RegistryError(
            f"{environment_id} has no published version; publish it before changing its status"
        )
    path = f"status/{environment_id}.json"
    status = change(parse_status(read(path), path))
    unknown = sorted(set(status.yanked) - set(versions))
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
    return f"{status.model_dump_json(by_alias=True, indent=2)}\n".encode()


def index_line(release: Release) -> bytes:
    """Return the line of a release in its index file, including the newline."""
    return f"{release.model_dump_json(by_alias=True)}\n".encode()


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


def _check_record(publication: Publication) -> None:
    release, wheel = publication.release, publication.release.wheel
    check_readable(release)
    check_owner(release.owner)
    check_name(release.name)
    check_version(release.version)
    module = module_name(release.owner, release.name)
    expected = {
        "distribution": (distribution_name(release.owner, release.name), release.distribution),
        "module": (module, release.module),
        "wheel.filename": (f"{module}-{release.version}-py3-none-any.whl", wheel.filename),
    }
    for field, (wanted, got) in expected.items():
        if wanted != got:
            raise RegistryError(f"{release.id}: {field} must be {wanted!r}, got {got!r}")
    check_bytes(publication.wheel, release)


def _check_owner_may_publish(read: Read, owner: str) -> None:
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


def _check_name_is_free(read: Read, release: Release) -> None:
    reserved = parse_reserved(read("reserved.txt") or b"")
    config = parse_record(RegistryConfig, read("config.json") or b"", "config.json")
    for name in {release.name, release.owner} - {config.name}:
        if plain(name) in reserved:
            raise RegistryError(
                f"{name!r} is a reserved name of this registry (reserved.txt), so {release.id} "
                "cannot be published; choose another name"
            )
    for other in same_distribution_ids(release.id):
        if read(f"index/{other}.jsonl") is not None:
            raise RegistryError(
                f"{release.id} would use the distribution name {release.distribution}, which "
                f"{other} already uses; choose another name"
            )
