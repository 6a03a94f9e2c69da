"""Checks the invariants of a registry in a folder: its current files and its git history."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from telescope_envs.registry.check_names import check_names
from telescope_envs.registry.check_tree import read_tree
from telescope_envs.registry.check_wheels import check_wheels
from telescope_envs.registry.findings import CheckReport
from telescope_envs.registry.history import check_history


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
    history = check_history(root, against=against)
    return CheckReport(
        registry=str(root),
        num_environments=len(tree.releases),
        num_releases=sum(len(lines) for lines in tree.releases.values()),
        num_commits=history.num_commits,
        findings=[*findings, *history.findings],
        unchecked=[] if history.num_commits else ["history", "alias-history"],
        notes=history.notes,
    )
