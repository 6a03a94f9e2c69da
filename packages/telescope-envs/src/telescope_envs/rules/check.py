"""Check the invariants of a registry in a folder: its files, its wheels and its git history.

Artifacts on other hosts are not fetched, and no wheel is run.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from telescope_core.base.errors import RegistryError
from telescope_envs.records.files import sha256_of
from telescope_envs.records.reading import (
    REMOVED_PATH,
    Listing,
    attestation_path,
    check_bytes,
    is_registry_path,
    is_web_address,
)
from telescope_envs.rules.history import HistoryReport, check_history, require_commit
from telescope_envs.rules.tree import CheckReport, IndexLine, Tree, check_names, read_tree
from telescope_envs.rules.wheel import check_release, read_wheel

_RESTORE = "restore the file from the git history or from a mirror; releases are never replaced"


def _check_wheel(tree: Tree, line: IndexLine) -> None:
    release = line.release
    if not release.wheel.urls:
        tree.add(
            "artifact", line.where, "has no wheel URL", "correct the line before committing it"
        )
    if tree.removals.has(release):
        _check_removed(tree, line)
        return
    if (release.id, release.version) in {(one.id, one.version) for one in tree.removals.removed}:
        what = f"names {release.id} {release.version}, which was published again with another wheel"
        fix = "remove the line before committing it, and raise the version instead"
        tree.add("removed", REMOVED_PATH, what, fix)
    for url in release.wheel.urls:
        if is_web_address(url):
            continue
        if not is_registry_path(url):
            tree.add("artifact", line.where, f"{url!r} points outside the registry", _RESTORE)
        elif url not in tree.paths:
            tree.add("artifact", line.where, f"{url} does not exist", _RESTORE)
        else:
            _check_content(tree, line, url)


def _check_removed(tree: Tree, line: IndexLine) -> None:
    """Add an error for a removed release whose line still exists."""
    release, label = line.release, f"{line.release.id} {line.release.version}"
    if any(url in tree.paths for url in release.wheel.urls):
        what, fix = f"names {label}, whose wheel is still there", "remove the wheel, or the entry"
        tree.add("removed", REMOVED_PATH, what, fix)
    if release.version not in tree.yanked.get(release.id, ()):
        what = f"names {label}, whose line stays without being yanked"
        fix = f"yank it, so that nobody is sent to its wheel: telescope env yank {release.id}@"
        tree.add("removed", REMOVED_PATH, what, f"{fix}{release.version}")


def _check_content(tree: Tree, line: IndexLine, path: str) -> None:
    release, data = line.release, tree.bytes_of(path)
    try:
        check_bytes(data, release)
    except RegistryError:
        digest = sha256_of(data)
        what = (
            f"{path} has {len(data)} bytes, sha256 {digest}; its release records "
            f"{release.wheel.size} bytes, sha256 {release.wheel.sha256}"
        )
        tree.add("artifact", line.where, what, _RESTORE)
        return
    try:
        check_release(read_wheel(data, release.wheel.filename), release)
    except RegistryError as error:
        tree.add("wheel", line.where, str(error), "publish a new version, and yank this one")
    bundle = attestation_path(path)
    if release.attestation_sha256 and bundle not in tree.paths:
        tree.add("artifact", line.where, f"{bundle} does not exist", _RESTORE)
    elif release.attestation_sha256:
        digest = sha256_of(tree.bytes_of(bundle))
        if digest != release.attestation_sha256:
            what = (
                f"{bundle} has sha256 {digest}, but its release records "
                f"{release.attestation_sha256}"
            )
            tree.add("artifact", line.where, what, _RESTORE)


def check_registry(
    root: Path,
    *,
    against: str = "",
    files: Listing | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> CheckReport:
    """Return all errors in the registry at `root`, without running code of a wheel.

    Besides the history of the current branch, `against` can name a git commit or branch: its index
    files must be a prefix of the index files here. `files` are those of a server's registry, which
    has no history.
    """
    # Before wheels are read, which takes long.
    require_commit(root, against)
    tree = read_tree(root, now=datetime.now(UTC), files=files)
    check_names(tree)
    for environment_id, lines in tree.releases.items():
        progress(f"checking {environment_id}")
        for line in lines:
            _check_wheel(tree, line)
    if files is None:
        progress("reading the git history")
        history = check_history(root, against=against, removals=tree.removals)
    else:
        kept = "history: kept by the database, which refuses to change or remove what it holds"
        history = HistoryReport(notes=[kept])
        for path in files.lost:
            if not any(path in one.what for one in tree.findings):
                tree.add("artifact", path, "does not exist, or has another size", _RESTORE)
    return CheckReport(
        registry=str(root),
        num_environments=len(tree.releases),
        num_releases=sum(len(lines) for lines in tree.releases.values()),
        num_commits=history.num_commits,
        findings=[*tree.findings, *history.findings],
        unchecked=[] if history.num_commits else ["history", "alias-history"],
        notes=history.notes,
    )
