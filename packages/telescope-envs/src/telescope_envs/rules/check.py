"""Checks the invariants of a registry in a folder: its files, its wheels and its git history.

Artifacts on other hosts are not fetched, and no wheel is run.
"""

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from telescope_core.errors import RegistryError
from telescope_envs.records.reading import (
    REMOVED_PATH,
    attestation_path,
    check_bytes,
    is_registry_path,
)
from telescope_envs.records.release import Release
from telescope_envs.rules.findings import CheckReport, Finding
from telescope_envs.rules.history import check_history
from telescope_envs.rules.tree import (
    IndexLine,
    Tree,
    check_names,
    read_tree,
)
from telescope_envs.rules.wheel import check_release, read_wheel

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
        elif url not in tree.paths and tree.removals.has(release):
            continue
        elif url not in tree.paths:
            yield _artifact(line.where, f"{url} does not exist", _RESTORE)
        else:
            yield from _check_content(tree, line, url)
            yield from _check_removed(tree, release)


def _check_removed(tree: Tree, release: Release) -> Iterator[Finding]:
    """Yield what is wrong if a release whose wheel is there counts as removed."""
    label = f"{release.id} {release.version}"
    if tree.removals.has(release):
        what, fix = f"names {label}, whose wheel is still there", "remove the wheel, or the entry"
        yield Finding(check="removed", where=REMOVED_PATH, what=what, fix=fix)
    elif any(
        (one.id, one.version) == (release.id, release.version) for one in tree.removals.removed
    ):
        what = f"names {label}, which was published again with another wheel"
        fix = "remove the line before committing it, and raise the version instead"
        yield Finding(check="removed", where=REMOVED_PATH, what=what, fix=fix)


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


def check_registry(
    root: Path,
    *,
    against: str = "",
    now: datetime | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> CheckReport:
    """Return everything that is wrong with the registry at `root`, without running any wheel.

    Besides the history of the current branch, `against` can name a git commit or branch: its index
    files must be a prefix of the index files here.
    """
    tree = read_tree(root, now=now or datetime.now(UTC))
    findings = [*tree.findings, *check_names(tree), *check_wheels(tree, progress=progress)]
    progress("reading the git history")
    history = check_history(root, against=against, removals=tree.removals)
    return CheckReport(
        registry=str(root),
        num_environments=len(tree.releases),
        num_releases=sum(len(lines) for lines in tree.releases.values()),
        num_commits=history.num_commits,
        findings=[*findings, *history.findings],
        unchecked=[] if history.num_commits else ["history", "alias-history"],
        notes=history.notes,
    )
