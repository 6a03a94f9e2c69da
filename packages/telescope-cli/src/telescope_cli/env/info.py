"""`telescope env info`: everything a user should know before using an environment."""

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated, Any

import typer
from msgspec import UNSET
from msgspec.structs import replace

from telescope_cli.env.options import JsonOption, RegistryOption, complete_name
from telescope_core.base.errors import TelescopeError, UnknownNameError
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_core.base.terminal import report_width
from telescope_core.finding.code_names import names_class, names_folder
from telescope_core.finding.locate import locate_environment
from telescope_core.finding.schemes import adapted
from telescope_envs.install.loading import declared_settings
from telescope_envs.locator import InstalledLocator
from telescope_envs.records.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.records.release import COMPUTED_DEFAULT, Setting
from telescope_envs.registry import Registry, Release, Status
from telescope_envs.registry.lookup import open_registry_of
from telescope_envs.registry.resolving import parse_request, resolve_with_warnings

_LABEL = 13

_INSTALLED = (EnvironmentPlace.SHARED, EnvironmentPlace.ISOLATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """All facts about one environment."""

    release: Release
    status: Status
    versions: tuple[str, ...]
    registry: str
    short_name: str
    """The name to type: the alias if there is one, else the id."""
    here: EnvironmentLocation | None
    """The installed or linked environment with that name; None if there is none."""
    locked: LockedEnvironment | None
    settings: tuple[Setting, ...] | None
    """Settings of the installed environment, else of the release; None if neither is known."""
    is_suspended: bool
    """Whether its owner is suspended."""
    problem: str
    """Reason why the installed environment cannot be used; empty if it can."""


def info(
    name: Annotated[
        str,
        typer.Argument(
            help="name, owner/name, owner/name@version, file.py:Class or a project folder",
            autocompletion=complete_name,
        ),
    ],
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe one environment: rewards, data, network, settings, versions and usage.

    Example: telescope env info math-reasoning
    """
    if adapted(name) is not None or names_class(name) or names_folder(name):
        _show_unpublished(locate_environment(name), as_json=as_json)
        return
    is_chosen = registry is not None or bool(parse_request(name).registry)
    opened = None
    try:
        opened = open_registry_of(name, registry if is_chosen else _registry_of_use(name))
        release = resolve_with_warnings(opened, name, allows_yanked=True).release
    except TelescopeError as error:
        is_unknown = opened is not None and isinstance(error, UnknownNameError)
        location = InstalledLocator().locate(name) if is_unknown or not is_chosen else None
        if location is None:
            raise
        problem = "it is not in the registry" if is_unknown else "its registry cannot tell more"
        _show_unpublished(location, f"{problem}: {error}", as_json=as_json)
        return
    about = _about(opened, release)
    if as_json:
        typer.echo(json.dumps(_as_json(about)))
        return
    lines = [*_facts(about), ("", ""), *_standing(about)]
    typer.echo("\n".join(_wrapped(label, text) for label, text in lines))
    used = _used_settings_lines(about)
    typer.echo("\n".join(("", *used, "", *_usage(about.short_name, about.settings or ()))))


def _registry_of_use(name: str) -> str | None:
    """Return the registry that the environment in use here came from; None if there is none.

    It is the one of the installation, else the one that the lock names.
    """
    try:
        here = InstalledLocator().locate(name)
    except TelescopeError:  # such as one that is locked and not installed
        here = None
    if here is not None:
        return here.registry if here.place in _INSTALLED and here.registry else None
    request, lock = parse_request(name), find_lock()
    entries = read_lock(lock).environments if lock is not None else ()
    return next((one.registry for one in entries if request.fits(one.id, one.registry)), None)


def _about(registry: Registry, release: Release) -> _About:
    lock = find_lock()
    aliases = {environment_id: alias for alias, environment_id in registry.aliases().items()}
    namespace = registry.namespace(release.owner)
    here, problem = None, ""
    settings = None if release.settings is UNSET else release.settings
    try:
        here = InstalledLocator().locate(release.id)
        settings = _settings_of(here) if here is not None else settings
    except TelescopeError as error:
        problem = str(error)
    return _About(
        release=release,
        status=registry.status(release.id),
        versions=tuple(known.version for known in registry.releases(release.id)),
        registry=registry.address,
        short_name=aliases.get(release.id, release.id),
        here=here,
        locked=read_lock(lock).find(release.id) if lock is not None else None,
        settings=settings,
        is_suspended=namespace is not None and namespace.status == "suspended",
        problem=problem,
    )


def _settings_of(here: EnvironmentLocation) -> tuple[Setting, ...]:
    interpreter = here.interpreter or sys.executable
    declared = declared_settings(interpreter, here.factory, here.search_path)
    own = here.config  # of a link
    return tuple(
        replace(one, default=json.dumps(own[one.name])) if one.name in own else one
        for one in declared
    )


def _show_unpublished(
    here: EnvironmentLocation, why: str = "it is not in the registry", *, as_json: bool
) -> None:
    """Show what is known about an environment that no registry describes; `why` says so."""
    settings = _settings_of(here)
    if as_json:
        rows = [setting.as_table() for setting in settings]
        about = {"id": here.id, "installed": here.version, "place": here.place.value}
        secrets = {} if here.secrets is None else {"secrets": list(here.secrets)}
        typer.echo(json.dumps({**about, "folder": here.registry, "settings": rows, **secrets}))
        return
    if here.place is EnvironmentPlace.IMPORTABLE:
        typer.echo(_wrapped("environment", here.id))
        typer.echo(_wrapped("installed", "no; it is imported from its file"))
    else:
        typer.echo(_wrapped("environment", f"{here.id} {here.version}"))
        typer.echo(_wrapped("installed", f"{_place_text(here)}; {why}"))
    if here.secrets is not None:
        typer.echo(_wrapped("secrets", ", ".join(here.secrets) or "none"))
    typer.echo("\n".join(("", *_settings_lines(settings), "", *_usage(here.id, settings))))


def _as_json(about: _About) -> dict[str, Any]:
    settings = about.settings
    return {
        **about.release.as_table(),
        "status": about.status.as_table(),
        "is_suspended": about.is_suspended,
        "versions": about.versions,
        "registry": about.registry,
        "installed": about.here.version if about.here is not None else None,
        "place": about.here.place.value if about.here is not None else None,
        "locked": about.locked.as_table() if about.locked is not None else None,
        "settings": None if settings is None else [one.as_table() for one in settings],
    }


def _facts(about: _About) -> Iterator[tuple[str, str]]:
    release = about.release
    reward = release.reward
    unknown = "(not counted)" if release.validation.checked_on else "endless"
    sizes = ", ".join(f"{split} {size or unknown}" for split, size in release.splits.items())
    needs = ", ".join(text for text in release.requires_dist if "extra ==" not in text)
    yield "environment", f"{release.id} {release.version}"
    yield "about", release.summary
    yield "examples", sizes
    yield (
        "reward",
        f"{reward.minimum:g} to {reward.maximum:g}, solved at {reward.success:g} or more",
    )
    yield "network", release.network
    yield "secrets", ", ".join(release.secrets) or "none"
    for data in release.datasets:
        yield "data", f"{data.repo} at {data.revision[:12]}{f' ({data.when})' if data.when else ''}"
    yield "python", release.requires_python
    yield "needs", needs or "nothing"
    yield "license", release.license
    yield "tags", ", ".join(release.tags) or "none"


def _standing(about: _About) -> Iterator[tuple[str, str]]:
    release, status = about.release, about.status
    published = f"{release.publisher}, {release.published_at.astimezone(UTC):%Y-%m-%d}"
    command = "sync" if about.locked is not None else f"install {about.short_name}"
    absent = f"no; run: telescope env {command}"
    yield "versions", ", ".join(about.versions)
    yield "installed", absent if about.here is None else _place_text(about.here)
    yield "locked", _locked_text(about)
    yield "validated", _validated_text(release)
    yield "attestation", release.attestation_sha256 or "none"
    yield "publisher", published
    yield "registry", about.registry
    yield "wheel", f"{release.wheel.filename}, {release.wheel.size} bytes"
    yield "sha256", release.wheel.sha256
    if about.is_suspended:
        yield "owner", f"{release.owner} is suspended: it publishes nothing new"
    for version, why in status.yanked.items():
        yield "yanked", f"{version}: {why}"
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        yield "deprecated", f"{status.deprecated.reason}{instead}"
    for advisory in status.advisories:
        yield "advisory", advisory


def _place_text(here: EnvironmentLocation) -> str:
    places = {
        EnvironmentPlace.LINKED: f"{here.version}, linked to {here.registry or 'this Python'}",
        EnvironmentPlace.SHARED: f"{here.version}, in this Python",
        EnvironmentPlace.ISOLATED: f"{here.version}, in a virtual environment of its own",
    }
    return places.get(here.place, here.version)


def _locked_text(about: _About) -> str:
    locked = about.locked
    if locked is None:
        return "no"
    is_same = locked.version != about.release.version or locked.sha256 == about.release.wheel.sha256
    note = "" if is_same else ", not the registry's wheel: do not use it"
    return f"{locked.version}, digest {locked.digest[:12]}{note}"


def _validated_text(release: Release) -> str:
    found = release.validation
    if found.verdict == "none":
        return "no"
    checked_on = f" on {found.checked_on}" if found.checked_on else ""
    return f"{found.verdict}{checked_on}, policy {found.policy}, report {found.report_sha256[:12]}"


def _used_settings_lines(about: _About) -> Iterator[str]:
    here = about.here
    if about.problem and here is not None:
        yield from _indented(f"settings: {about.problem}", "")
    elif about.settings is None:
        text = "this release does not record them; install it to see them"
        yield from _indented(f"settings: {text}", "")
    else:
        is_other = here is not None and here.version != about.release.version
        of = f"of {here.version}, which is used here" if here is not None and is_other else ""
        yield from _settings_lines(about.settings, of)


def _settings_lines(settings: Sequence[Setting], of: str = "") -> Iterator[str]:
    label = f"settings {of}" if of else "settings"
    yield f"{label}: --env.NAME VALUE, or env = {{ NAME = VALUE }} in a file"
    if not settings:
        yield "  none"
    for setting in settings:
        default = f"default {setting.default}" if setting.default else "required"
        yield from _indented(f"{setting.name}: {setting.type}; {default}", "  ")
        if setting.help:
            yield from textwrap.wrap(
                setting.help, report_width(), initial_indent=" " * 6, subsequent_indent=" " * 6
            )


def _usage(name: str, settings: Sequence[Setting]) -> Iterator[str]:
    no_example = ("", '""', "null", COMPUTED_DEFAULT)
    example = next((setting for setting in settings if setting.default not in no_example), None)
    flag = ""
    if example is not None:
        # A JSON value as one would type it.
        text = example.default.strip('"') if " " not in example.default else f"'{example.default}'"
        flag = f" --env.{example.name} {text}"
    yield "to use it"
    yield f"  telescope eval {name} --model ./my-model"
    if flag:
        yield f"  telescope eval {name} --model ./my-model{flag}"
    yield "  in the settings file of telescope train:"
    yield f'    [[environments]]\n    name = "{name}"'


def _wrapped(label: str, text: str) -> str:
    lines = textwrap.wrap(text, report_width() - _LABEL, break_on_hyphens=False) or [""]
    gap = " " * _LABEL
    return "\n".join([f"{label:<{_LABEL}}{lines[0]}".rstrip(), *(gap + line for line in lines[1:])])


def _indented(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        report_width(),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )
