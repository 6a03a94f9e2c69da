"""`telescope env install`, `sync`, `update` and `uninstall`, and the outcomes of each."""

import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    JsonOption,
    NoLockOption,
    OfflineOption,
    OptionalNamesArgument,
    RegistryOption,
    complete_installed,
    progress,
    split_names,
)
from telescope_core.base.errors import ConfigError, RegistryError, TelescopeError, unknown_name
from telescope_core.base.interrupts import asked, held
from telescope_core.base.secret_names import secrets_line
from telescope_envs.install.adapted import unlink_adapted
from telescope_envs.install.install import install as install_environment
from telescope_envs.install.install import uninstall as uninstall_environment
from telescope_envs.install.steps import InstallOptions
from telescope_envs.install.sync import prune, sync_environment
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.links import links, unlink
from telescope_envs.records.lockfile import (
    Lock,
    LockedEnvironment,
    find_lock,
    lock_path,
    read_lock,
)
from telescope_envs.records.release import Release
from telescope_envs.registry import Opening, Registry, open_registry, parse_request
from telescope_envs.registry.lookup import open_registry_of
from telescope_envs.registry.resolving import UpdatePlan, plan_update, removals

_AT_ONCE = 4
_END_WITHIN_S = 5.0
"""Seconds at a signal for what runs to remove its unfinished folders; later installs would."""
_WORDS = {"unchanged": "already installed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome for one environment."""

    name: str
    """Name as it was typed."""
    id: str = ""
    version: str = ""
    state: str
    """installed, unchanged, removed or failed."""
    secrets: tuple[str, ...] = ()
    """Names of the environment variables that it may read."""
    error: str = ""
    exit_code: int = 0


def install(
    names: OptionalNamesArgument = None,
    from_bundle: Annotated[
        Path | None,
        typer.Option(
            "--from-bundle",
            metavar="FILE",
            help="Install from a file that telescope env bundle wrote, without network access.",
        ),
    ] = None,
    max_bundle_gb: Annotated[
        int,
        typer.Option(
            "--max-bundle-gb", metavar="N", min=1, help="Largest bundle to install from, in GiB."
        ),
    ] = 10,
    registry: RegistryOption = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Install into the Python that runs this command."),
    ] = False,
    no_lock: NoLockOption = False,
    allow_sdist: AllowSdistOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check environments against the registry and install them.

    Each gets its own virtual environment and its packages are recorded in telescope.lock. If one
    fails, the others are still installed. Installing an environment runs its author's code.

    Example: telescope env install math-reasoning countdown@0.1.0
    """
    options = InstallOptions(
        shared=shared,
        offline=offline,
        allow_sdist=split_names(allow_sdist),
        lock=None if no_lock else lock_path(),
    )
    if from_bundle is not None and (shared or registry):
        raise ConfigError("--from-bundle cannot be combined with --shared or --registry")
    if from_bundle is not None:
        from telescope_cli.env.bundle import installed_from_bundle

        done = installed_from_bundle(
            from_bundle, names or [], options=options, max_bytes=max_bundle_gb * 2**30
        )
        report(done, as_json=as_json)
        return
    if not names:
        raise ConfigError("give at least one NAME, such as math-reasoning, or --from-bundle FILE")
    opening = Opening(offline=offline, tell=progress)
    shared_registry = cache(lambda: open_registry(registry, opening))

    def opened(name: str) -> Registry:
        if parse_request(name).registry:
            return open_registry_of(name, registry, opening)
        return shared_registry()

    report(install_all(opened, names, options=options), as_json=as_json)


def install_all(
    registry_of: Callable[[str], Registry], names: Sequence[str], *, options: InstallOptions
) -> list[Outcome]:
    """Install `names` and return their outcomes in that order.

    Several install at once, unless they are installed into the shared Python.
    """

    def one(name: str) -> Outcome:
        registry = registry_of(name)
        done = install_environment(registry, name, options=options, progress=progress)
        return installed(name, done.release, is_new=done.is_new)

    at_once = 1 if options.shared else _AT_ONCE
    return attempt_all({name: partial(one, name) for name in names}, at_once=at_once)


def sync(
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if telescope.lock would have to change.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Ask the registries, and fail for what is removed, replaced, yanked, deprecated, "
            "has an advisory or a suspended owner.",
        ),
    ] = False,
    reinstall: Annotated[
        bool,
        typer.Option(
            "--reinstall",
            help="Build each virtual environment again, from packages that are fetched anew and "
            "checked against the lock.",
        ),
    ] = False,
    offline: OfflineOption = False,
    prune_others: Annotated[
        bool, typer.Option("--prune", help="Remove environments that telescope.lock does not list.")
    ] = False,
    registry: RegistryOption = None,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install exactly what telescope.lock lists: the same wheels and the same packages.

    A wheel comes from the registry that the lock names, or from --registry, and must have the hash
    in the lock. Objections of the registry to a release, such as that it is yanked, are shown when
    its wheel is fetched.

    Example: telescope env sync --locked
    """
    path = find_lock()
    if path is None:
        raise ConfigError(
            "there is no telescope.lock in this folder or above; telescope env install NAME writes "
            "one"
        )
    options = InstallOptions(
        offline=offline, allow_sdist=split_names(allow_sdist), lock=path, reinstall=reinstall
    )
    opening = Opening(offline=offline, tell=progress)

    def opened(named: str) -> Registry:
        with _if_moved("add --registry PLACE") if not registry else nullcontext():
            return open_registry(registry or named, opening)

    def one(entry: LockedEnvironment) -> Outcome:
        done = sync_environment(
            entry,
            options=options,
            may_change=not locked,
            open_registry=opened,
            progress=progress,
            is_strict=strict,
        )
        return installed(entry.id, done.release, is_new=done.is_new)

    entries = read_lock(path).environments
    done = attempt_all({entry.id: partial(one, entry) for entry in entries}, at_once=_AT_ONCE)
    if prune_others and not any(outcome.error for outcome in done):
        done += [
            Outcome(name=found.id, id=found.id, version=found.version, state="removed")
            for found in prune({entry.id for entry in entries})
        ]
    report(done, as_json=as_json)


def uninstall(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=complete_installed)
    ],
    no_lock: NoLockOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove installed environments, also from telescope.lock.

    The dependencies of one installed with --shared stay. A linked environment is unlinked, and its
    folder is not changed.

    Example: telescope env uninstall countdown
    """
    lock = None if no_lock else find_lock()
    rows: list[dict[str, str]] = []
    try:
        for name in names:
            rows.append(_removed(name, lock))
    finally:  # What was removed before an error is told as well.
        if as_json:
            typer.echo(json.dumps(rows))
        for row in () if as_json else rows:
            done = f"no longer linked to {row['unlinked']}" if "unlinked" in row else "removed"
            typer.echo(f"{row['id']}{' ' + row['version'] if 'version' in row else ''}: {done}")


def _removed(name: str, lock: Path | None) -> dict[str, str]:
    """Remove the link or the installation of `name`; returns its row for --json."""
    foreign = unlink_adapted(name)
    if foreign is not None:
        return {"id": name, "unlinked": foreign.interpreter or "this Python"}
    link = unlink(name)
    if link is not None:
        return {"id": link.id, "unlinked": str(link.folder)}
    found = uninstall_environment(name, lock=lock)
    return {"id": found.id, "version": found.version}


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
                install_environment(current.registry, asked, options=options, progress=progress)
        except TelescopeError as error:
            problem = problem or error
            typer.echo(f"telescope: {environment_id}: {error}", err=True)
            continue
        rows.append(_plan_row(plan, is_done=not dry_run))
        if not as_json:
            typer.echo(_plan_text(plan, is_done=not dry_run))
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
            bare = {one.partition("/")[2] or one for one in ids}
            raise unknown_name("installed environment", name, ids | bare)
        wanted += found
    return wanted


def _current(environment_id: str, lock: Lock) -> _Current:
    locked = lock.find(environment_id)
    found = next((one for one in installed_environments() if one.id == environment_id), None)
    record = found.installation if found is not None else None
    if locked is None:
        assert record is not None, "only what is locked or has a record is updated"
        is_shared = not record.interpreter
        named = f"{environment_id}@{record.release.version}{' --shared' if is_shared else ''}"
        with _if_moved(f"run: telescope env install {named} --registry PLACE"):
            place = open_registry(record.registry)
        return _Current(release=record.release, registry=place, is_shared=is_shared)
    named = f"{environment_id}@{locked.version}"
    with _if_moved(f"run: telescope env install {named} --registry PLACE"):
        registry = open_registry(locked.registry)
    release = next(
        (one for one in registry.releases(environment_id) if one.version == locked.version), None
    )
    if release is None and (removed := removals(registry, environment_id, locked.version)):
        raise RegistryError(
            f"telescope.lock has {locked.version}: {removed[0]}; to choose another release, run: "
            f"telescope env install {environment_id}"
        )
    if release is None:
        raise RegistryError(
            f"telescope.lock has {locked.version}, which is not in {registry.address}: either this "
            "is not the registry it came from, or that registry lost a release"
        )
    return _Current(release=release, registry=registry, is_shared=False)


@contextmanager
def _if_moved(advice: str) -> Generator[None]:
    """Add `advice` to an error of the registry that a record or a lock names."""
    try:
        yield
    except (ConfigError, RegistryError) as error:
        raise type(error)(f"{error}. If that registry has moved, {advice}") from None


def _plan_row(plan: UpdatePlan, *, is_done: bool) -> dict[str, Any]:
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


def _plan_text(plan: UpdatePlan, *, is_done: bool) -> str:
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


def attempt(name: str, install: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of `install`; a TelescopeError becomes a failed outcome."""
    try:
        return install()
    except TelescopeError as error:
        return Outcome(name=name, state="failed", error=str(error), exit_code=error.exit_code)


def attempt_all(installs: Mapping[str, Callable[[], Outcome]], *, at_once: int) -> list[Outcome]:
    """Run `installs` (typed name -> function), up to `at_once` together; returns their outcomes.

    The outcomes are in the order of `installs`. At a signal, those that wait are not begun, and
    those that run end at their next step, and their programs at once.
    """
    futures = {name: Future[Outcome]() for name in installs}
    waiting = iter(installs.items())  # a step of it is taken by one thread only

    def work() -> None:
        for name, install in waiting:
            if asked() is not None:
                return
            try:
                futures[name].set_result(attempt(name, install))
            except BaseException as error:  # noqa: BLE001 - the main thread raises it again
                futures[name].set_exception(error)

    # Those of an executor would keep the process from ending while a server does not answer.
    threads = [Thread(target=work, daemon=True) for _ in range(min(at_once, len(installs)))]
    try:
        for thread in threads:
            thread.start()
        return [future.result() for future in futures.values()]
    except KeyboardInterrupt:
        until_s = time.monotonic() + _END_WITHIN_S
        with held():
            for thread in threads:
                if thread.is_alive():
                    thread.join(max(0.0, until_s - time.monotonic()))
        raise


def installed(name: str, release: Release, *, is_new: bool) -> Outcome:
    """Return the outcome for an environment that is now installed."""
    return Outcome(
        name=name,
        id=release.id,
        version=release.version,
        state="installed" if is_new else "unchanged",
        secrets=release.secrets,
    )


def report(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print each outcome; exits with the exit code of the first failure, if any.

    A line about the secrets of each environment goes to standard error, also with --json.
    """
    failed = [outcome for outcome in outcomes if outcome.error]
    if as_json:
        typer.echo(json.dumps([_outcome_row(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.error:
            typer.echo(f"telescope: {outcome.name}: {outcome.error}", err=True)
        elif not as_json:
            done = _WORDS.get(outcome.state, outcome.state)
            typer.echo(f"{outcome.id} {outcome.version}: {done}")
        if line := secrets_line(outcome.id, outcome.secrets, os.environ):
            typer.echo(line, err=True)
    if failed and len(outcomes) > 1:
        typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} are installed", err=True)
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _outcome_row(outcome: Outcome) -> dict[str, str]:
    """Return the JSON object of one outcome, for --json."""
    row = {"name": outcome.name, "state": outcome.state}
    if outcome.error:
        return {**row, "error": outcome.error}
    return {**row, "id": outcome.id, "version": outcome.version}
