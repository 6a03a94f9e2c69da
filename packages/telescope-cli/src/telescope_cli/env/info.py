"""`telescope env info`: everything a person wants to know before using an environment."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import Annotated, Any

import typer

from telescope_cli.env.options import JsonOption, RegistryOption, complete_name
from telescope_core.errors import TelescopeError
from telescope_envs.declared_settings import DeclaredSetting, declared_settings
from telescope_envs.install import find_installed
from telescope_envs.installed import InstalledEnvironment
from telescope_envs.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.registry import Registry, Release, Status, open_registry, resolve

_LABEL = 13
_WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """All that is known of one environment."""

    release: Release
    status: Status
    versions: tuple[str, ...]
    registry: str
    short_name: str
    """What people type: the alias where there is one."""
    installed: InstalledEnvironment | None
    locked: LockedEnvironment | None
    settings: tuple[DeclaredSetting, ...] | None
    """None: it is not installed, or cannot be loaded."""
    settings_problem: str


def info(
    name: Annotated[
        str,
        typer.Argument(help="name, owner/name or owner/name@version", autocompletion=complete_name),
    ],
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe one environment: rewards, data, network, settings, versions, how to use it.

    Example: telescope env info math-reasoning
    """
    about = _about(open_registry(registry), name)
    if as_json:
        typer.echo(json.dumps(_as_json(about)))
        return
    lines = [*_facts(about), ("", ""), *_standing(about)]
    typer.echo("\n".join(_wrapped(label, text) for label, text in lines))
    typer.echo("\n".join(("", *_settings_lines(about), "", *_usage(about))))


def _about(registry: Registry, name: str) -> _About:
    release = resolve(registry, name)
    found = find_installed(release.id)
    lock = find_lock()
    aliases = {environment_id: alias for alias, environment_id in registry.aliases().items()}
    settings, problem = None, "install it to see them"
    if found is not None:
        try:
            settings = tuple(declared_settings(found.interpreter, found.factory))
        except TelescopeError as error:
            problem = str(error)
    return _About(
        release=release,
        status=registry.status(release.id),
        versions=tuple(known.version for known in registry.releases(release.id)),
        registry=registry.address,
        short_name=aliases.get(release.id, release.id),
        installed=found,
        locked=read_lock(lock).find(release.id) if lock is not None else None,
        settings=settings,
        settings_problem=problem,
    )


def _as_json(about: _About) -> dict[str, Any]:
    settings = about.settings
    return {
        **about.release.model_dump(mode="json", by_alias=True),
        "status": about.status.model_dump(mode="json", by_alias=True),
        "versions": about.versions,
        "registry": about.registry,
        "installed": about.installed.version if about.installed is not None else None,
        "locked": about.locked.model_dump(mode="json") if about.locked is not None else None,
        "settings": None if settings is None else [asdict(setting) for setting in settings],
    }


def _facts(about: _About) -> Iterator[tuple[str, str]]:
    release = about.release
    reward = release.reward
    sizes = ", ".join(f"{split} {size or 'endless'}" for split, size in release.splits.items())
    needs = ", ".join(text for text in release.requires_dist if "extra ==" not in text)
    yield "environment", f"{release.id} {release.version}"
    yield "about", release.summary
    yield "examples", sizes
    yield "reward", f"{reward.minimum:g} to {reward.maximum:g}, solved from {reward.success:g}"
    yield "network", release.network
    yield "secrets", ", ".join(release.secrets) or "none"
    for data in release.datasets:
        yield "data", f"{data.repo} at {data.revision[:12]}{f' ({data.when})' if data.when else ''}"
    yield "python", release.requires_python
    yield "needs", needs or "nothing"
    yield "licence", release.license
    yield "tags", ", ".join(release.tags) or "none"


def _standing(about: _About) -> Iterator[tuple[str, str]]:
    release, status = about.release, about.status
    published = f"{release.publisher}, {release.published_at.astimezone(UTC):%Y-%m-%d}"
    yield "versions", ", ".join(about.versions)
    yield "installed", _installed_text(about)
    yield "locked", _locked_text(about)
    yield "validated", _validated_text(release)
    yield "attestation", release.attestation_sha256 or "none"
    yield "publisher", published
    yield "registry", about.registry
    yield "wheel", f"{release.wheel.filename}, {release.wheel.size} bytes"
    yield "sha256", release.wheel.sha256
    for version, why in status.yanked.items():
        yield "yanked", f"{version}: {why}"
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        yield "deprecated", f"{status.deprecated.reason}{instead}"
    for advisory in status.advisories:
        yield "advisory", advisory


def _installed_text(about: _About) -> str:
    found = about.installed
    if found is None:
        return f"no; run: telescope env install {about.short_name}"
    return found.version


def _locked_text(about: _About) -> str:
    locked = about.locked
    if locked is None:
        return "no"
    is_same = locked.version != about.release.version or locked.sha256 == about.release.wheel.sha256
    note = "" if is_same else ", another wheel than the registry's: do not use it"
    return f"{locked.version}, digest {locked.digest[:12]}{note}"


def _validated_text(release: Release) -> str:
    found = release.validation
    if found.verdict == "none":
        return "no"
    return f"{found.verdict}, checks of {found.policy}, report {found.report_sha256[:12]}"


def _settings_lines(about: _About) -> Iterator[str]:
    if about.settings is None:
        yield from _indented(f"settings: {about.settings_problem}", "")
        return
    found = about.installed
    is_other = found is not None and found.version != about.release.version
    of = f" of {found.version}, which is installed" if found is not None and is_other else ""
    yield f"settings{of}: --env.NAME VALUE, or env = {{ NAME = VALUE }} in a file"
    if not about.settings:
        yield "  none"
    for setting in about.settings:
        default = f"default {setting.default}" if setting.default else "must be given"
        yield from _indented(f"{setting.name}: {setting.type}; {default}", "  ")
        if setting.help:
            yield from textwrap.wrap(
                setting.help, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
            )


def _usage(about: _About) -> Iterator[str]:
    name = about.short_name
    example = next((s for s in about.settings or () if s.default), None)
    flag = f" --env.{example.name} {_plain(example.default)}" if example is not None else ""
    yield "to use it"
    yield f"  telescope eval {name} --model ./my-model"
    if flag:
        yield f"  telescope eval {name} --model ./my-model{flag}"
    yield "  in the file of telescope train:"
    yield f'    [[environments]]\n    name = "{name}"'


def _plain(default: str) -> str:
    """Return a JSON value as it is typed after a flag."""
    return default.strip('"') if " " not in default else f"'{default}'"


def _wrapped(label: str, text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - _LABEL, break_on_hyphens=False) or [""]
    gap = " " * _LABEL
    return "\n".join([f"{label:<{_LABEL}}{lines[0]}".rstrip(), *(gap + line for line in lines[1:])])


def _indented(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
