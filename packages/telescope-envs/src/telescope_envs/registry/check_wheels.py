"""Checks the artifacts inside a registry's tree; artifacts on other hosts are not fetched."""

import hashlib
from collections.abc import Callable, Iterator

from telescope_core.errors import RegistryError
from telescope_envs.registry.check_tree import IndexLine, Tree
from telescope_envs.registry.findings import Finding
from telescope_envs.registry.store import attestation_path, is_registry_path
from telescope_envs.registry.wheel import check_bytes, check_release, read_wheel

_RESTORE = "restore the file from the git history or from a mirror; releases are never replaced"


def check_wheels(
    tree: Tree, *, progress: Callable[[str], None] = lambda step: None
) -> Iterator[Finding]:
    """Yield what is wrong with the wheels and their attestations."""
    for environment_id, lines in tree.releases.items():
        progress(f"checking {environment_id}")
        for line in lines:
            yield from _check_wheel(tree, line)


def _check_wheel(tree: Tree, line: IndexLine) -> Iterator[Finding]:
    release = line.release
    if not release.wheel.urls:
        yield _artifact(line.where, "has no wheel URL", "correct the line before committing it")
    for url in release.wheel.urls:
        if url.startswith(("https://", "http://")):
            continue
        if not is_registry_path(url):
            yield _artifact(line.where, f"{url!r} points outside the registry", _RESTORE)
        elif url not in tree.paths:
            yield _artifact(line.where, f"{url} does not exist", _RESTORE)
        else:
            yield from _check_content(tree, line, url)


def _check_content(tree: Tree, line: IndexLine, path: str) -> Iterator[Finding]:
    release, data = line.release, tree.bytes_of(path)
    try:
        check_bytes(data, release)
    except RegistryError:
        digest = hashlib.sha256(data).hexdigest()
        what = (
            f"{path} has {len(data)} bytes, sha256 {digest}; its release records "
            f"{release.wheel.size} bytes, sha256 {release.wheel.sha256}"
        )
        yield _artifact(line.where, what, _RESTORE)
        return
    try:
        check_release(read_wheel(data, release.wheel.filename), release)
    except RegistryError as error:
        fix = "publish a new version, and yank this one"
        yield Finding(check="wheel", where=line.where, what=str(error), fix=fix)
    bundle = attestation_path(path)
    if release.attestation_sha256 and bundle in tree.paths:
        digest = hashlib.sha256(tree.bytes_of(bundle)).hexdigest()
        if digest != release.attestation_sha256:
            what = (
                f"{bundle} has sha256 {digest}, but its release records "
                f"{release.attestation_sha256}"
            )
            yield _artifact(line.where, what, _RESTORE)


def _artifact(where: str, what: str, fix: str) -> Finding:
    return Finding(check="artifact", where=where, what=what, fix=fix)
