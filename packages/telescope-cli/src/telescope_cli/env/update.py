"""`telescope env update`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from telescope_cli.env.options import JsonOption, complete_installed, progress, with_bare_names
from telescope_core.base.errors import ConfigError, RegistryError, TelescopeError, unknown_name
from telescope_envs.install.install import install
from telescope_envs.install.steps import InstallOptions
from telescope_envs.install.updating import UpdatePlan, plan_update
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.links import links
from telescope_envs.records.lockfile import Lock, find_lock, read_lock
from telescope_envs.records.release import Release
from telescope_envs.registry.lookup import open_registry
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import parse_request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Current:
    """The release in use, its registry, and how it is installed."""

    release: Release
    registry: Registry
    is_shared: bool


def update(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="Environments; by default all in telescope.lock, or all that are installed.",
            autocompletion=complete_installed,
        ),
    ] = None,
    major: Annotated[
        bool, typer.Option("--major", help="Allow new major versions, whose scores do not compare.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, without changing anything.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Update environments and telescope.lock to the newest release that can be used.

    Each is looked up in the registry it came from. Changes in rewards, splits, network and secrets
    are shown.

    Example: telescope env update math-reasoning --dry-run
    """
    lock = find_lock()
    rows: list[dict[str, Any]] = []
    problem: TelescopeError | None = None
    for environment_id in _wanted(names or [], lock):
        try:
            current = _current(environment_id, read_lock(lock) if lock else Lock())
            plan = plan_update(current.registry, current.release, allow_major=major)
            if plan.after is not None and not dry_run:
                options = InstallOptions(shared=current.is_shared, lock=lock)
                asked = f"{environment_id}@{plan.after.version}"
                install(current.registry, asked, options=options, progress=progress)
        except TelescopeError as error:
            problem = problem or error
            typer.echo(f"telescope: {environment_id}: {error}", err=True)
            continue
        rows.append(_row(plan, is_done=not dry_run))
        if not as_json:
            typer.echo(_text(plan, is_done=not dry_run))
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows and problem is None:
        typer.echo("Nothing installed is from a registry; see: telescope env list --installed")
    if problem is not None:
        raise typer.Exit(problem.exit_code)


def _wanted(names: list[str], lock: Path | None) -> list[str]:
    """Return the ids to update; raises UnknownNameError for a name that is not installed."""
    entries = read_lock(lock).environments if lock is not None else ()
    locked = [(one.id, one.registry) for one in entries]
    installed = [(one.id, one.registry) for one in installed_environments() if one.is_recorded]
    linked = {link.id for link in links()}
    if not names:
        return [one for one, _ in (locked or installed) if one not in linked]
    here = sorted({*locked, *installed})
    wanted: list[str] = []
    for name in names:
        request = parse_request(name)
        if request.wanted:
            raise ConfigError(
                f"{name!r}: update chooses the version itself; to choose one yourself, run: "
                f"telescope env install {name}"
            )
        found = {one for one, registry in here if request.fits(one, registry)}
        if len(found) != 1:
            ids = {one for one, _ in here}
            raise unknown_name("installed environment", name, with_bare_names(ids))
        wanted += found
    return wanted


def _current(environment_id: str, lock: Lock) -> _Current:
    locked = lock.find(environment_id)
    found = next((one for one in installed_environments() if one.id == environment_id), None)
    record = found.installation if found is not None else None
    if locked is None:
        assert record is not None, "only what is locked or has a record is updated"
        place = open_registry(record.registry)
        is_shared = not record.interpreter
        return _Current(release=record.release, registry=place, is_shared=is_shared)
    registry = open_registry(locked.registry)
    release = next(
        (one for one in registry.releases(environment_id) if one.version == locked.version), None
    )
    if release is None:
        raise RegistryError(
            f"telescope.lock has {locked.version}, which is not in {registry.address}: either this "
            "is not the registry it came from, or that registry lost a release"
        )
    return _Current(release=release, registry=registry, is_shared=False)


def _row(plan: UpdatePlan, *, is_done: bool) -> dict[str, Any]:
    after = plan.after
    return {
        "id": plan.before.id,
        "before": plan.before.version,
        "after": after.version if after is not None else None,
        "updated": after is not None and is_done,
        "changes": plan.changes,
        "refused": plan.refused,
        "warnings": plan.warnings,
    }


def _text(plan: UpdatePlan, *, is_done: bool) -> str:
    before, after = plan.before, plan.after
    if after is None:
        head = f"{before.id} {before.version}: {'stays' if plan.refused else 'is the newest'}"
    else:
        head = f"{before.id} {before.version} -> {after.version}" + (
            "" if is_done else " (not changed: --dry-run)"
        )
    lines = [head, *(f"  {line}" for line in plan.changes)]
    if after is None or not is_done:  # installing tells them itself
        lines += [f"  warning: {line}" for line in plan.warnings]
    return "\n".join([*lines, f"  {plan.refused}"] if plan.refused else lines)
