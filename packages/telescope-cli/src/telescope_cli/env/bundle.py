"""`telescope env bundle`, and installing from one."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.install import Outcome, attempt, installed
from telescope_cli.env.options import (
    JsonOption,
    RegistryOption,
    complete_name,
    progress,
    split_names,
)
from telescope_core.base.errors import ConfigError
from telescope_envs.install.bundling import (
    ALL_DATASETS,
    Part,
    part_of_lock,
    part_of_registry,
    write_bundle,
)
from telescope_envs.install.open_bundle import (
    MAX_BUNDLE_BYTES,
    OpenBundle,
    chosen_entries,
    entry_named,
    install_bundled,
    opened_bundle,
)
from telescope_envs.install.steps import InstallOptions
from telescope_envs.records.lockfile import Lock, LockedEnvironment, find_lock, read_lock
from telescope_envs.registry import Opening, Registry, open_registry
from telescope_envs.registry.lookup import open_registry_of


def bundle(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="Environments to bundle; by default all in telescope.lock.",
            autocompletion=complete_name,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The bundle to write.")
    ] = Path("telescope-bundle.zip"),
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--datasets",
            metavar="ID,...",
            help="Put these datasets into it as well, or all that the environments can load.",
        ),
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one file from which environments install without network access.

    The bundle contains what telescope.lock lists, including wheels of all dependencies, for
    machines with this platform and this Python version.

    Example: telescope env bundle -o environments.zip
    """
    if not output.resolve().parent.is_dir():
        raise ConfigError(
            f"--output {output}: the folder {output.resolve().parent} does not exist; create it"
        )
    path = find_lock()
    lock = read_lock(path) if path is not None else Lock()
    if not names and not lock.environments:
        raise ConfigError("telescope.lock lists no environments; give the NAMEs to bundle")
    parts = _parts(names or [], lock, registry)
    chosen = split_names(datasets)
    manifest = write_bundle(parts, output.resolve(), datasets=chosen, progress=progress)
    num_bytes = output.stat().st_size
    if num_bytes > MAX_BUNDLE_BYTES:
        progress(
            f"warning: to install from it, add --max-bundle-gb {-(-num_bytes // 2**30)}: without "
            f"it, a bundle may have {MAX_BUNDLE_BYTES} bytes"
        )
    needed = [
        {
            "environment": part.entry.id,
            "repo": data.repo,
            "revision": data.revision,
            "is_held": data.repo in chosen or ALL_DATASETS in chosen,
        }
        for part in parts
        for data in part.entry.datasets
    ]
    if as_json:
        rows = [{"id": part.entry.id, "version": part.entry.version} for part in parts]
        about = {"file": str(output), "bytes": num_bytes, "environments": rows, "datasets": needed}
        typer.echo(json.dumps(about))
        return
    for part in parts:
        typer.echo(f"{part.entry.id} {part.entry.version}: in the bundle")
    for row in needed:
        lacks = f"it is not in the bundle; add --datasets {row['repo']}, or copy it yourself"
        said = "it is in the bundle" if row["is_held"] else lacks
        typer.echo(f"{row['environment']} can load {row['repo']} at {row['revision']}: {said}")
    typer.echo(
        f"{output}: {len(manifest.files)} files, {num_bytes / 1e6:.1f} MB, {manifest.platform}"
    )


def _parts(names: Sequence[str], lock: Lock, registry: str | None) -> list[Part]:
    """Return what to bundle: entries of the lock, and releases resolved for all other names."""
    opening = Opening(tell=progress)

    def opened(named: str) -> Registry:
        return open_registry(registry or named, opening)

    in_lock = {name: entry_named(lock, name) for name in names}
    known = [one for one in in_lock.values() if one is not None] if names else lock.environments
    parts = [part_of_lock(entry, opened, progress=progress) for entry in known]
    for name, entry in in_lock.items():
        if entry is None:
            place = open_registry_of(name, registry, opening)
            options = InstallOptions()
            parts.append(part_of_registry(place, name, options=options, progress=progress))
    return parts


def installed_from_bundle(
    path: Path, names: Sequence[str], *, options: InstallOptions, max_bytes: int = MAX_BUNDLE_BYTES
) -> list[Outcome]:
    """Install `names`, or everything, from the bundle at `path`; returns the outcome of each."""

    def one(bundled: OpenBundle, entry: LockedEnvironment) -> Outcome:
        done = install_bundled(bundled, entry, options=options, progress=progress)
        return installed(entry.id, done.release, is_new=done.is_new)

    with opened_bundle(path, progress=progress, max_bytes=max_bytes) as bundled:
        entries = chosen_entries(bundled.lock, names)
        return [attempt(entry.id, partial(one, bundled, entry)) for entry in entries]
