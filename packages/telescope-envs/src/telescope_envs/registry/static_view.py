"""Renders a registry as a folder of files for a static host.

The view consists of the tree itself, `v1/index.json` for clients that cannot list folders, and the
simple index for pip and uv. Equal registries give equal bytes. The view is written to a temporary
folder that then replaces an older view by renaming, so a host never serves half of it.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.catalog import (
    CATALOG_PATH,
    write_catalog,
)
from telescope_envs.records.reading import (
    check_bytes,
    is_registry_path,
    metadata_path,
    tree_files,
)
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.simple_index import front_pages, pages_of
from telescope_envs.rules.wheel import check_release, read_wheel

_GENERATED = ("v1", "simple")


def render(
    source: Path, target: Path, *, progress: Callable[[str], None] = lambda step: None
) -> int:
    """Write the static view of the registry at `source` to `target`; returns the number of files.

    `target` must be new, empty, or an older view. Raises RegistryError if a record or wheel of the
    registry is invalid; `target` is then unchanged.
    """
    _check_target(source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        count = 0
        for path, data in rendered_files(source, progress=progress):
            file = aside / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            count += 1
        aside.chmod(0o755)
        _take_place(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return count


def rendered_files(
    source: Path, *, progress: Callable[[str], None] = lambda step: None
) -> Iterator[tuple[str, bytes]]:
    """Yield the path and bytes of every file of the view, beginning with the registry's files."""
    registry = Registry.at(source)
    for path in tree_files(source):
        if path.partition("/")[0] not in _GENERATED and not path.endswith(metadata_path("")):
            yield path, (source / path).read_bytes()
    rows = registry.catalog()
    yield CATALOG_PATH, write_catalog(rows)
    rendered: list[str] = []
    for environment_id in _ids(source):
        progress(f"rendering {environment_id}")
        releases, unreadable = registry.read_releases(environment_id)
        if unreadable:
            raise RegistryError(unreadable[0].why)
        if not releases:
            continue
        rendered.append(environment_id)
        for release in releases:
            inside = [url for url in release.wheel.urls if is_registry_path(url)]
            if inside:
                metadata = _checked_metadata(registry, release)
                yield from ((metadata_path(url), metadata) for url in inside)
        status = registry.status(environment_id)
        yield from pages_of(environment_id, releases, status, has_metadata=True).items()
    yield from front_pages(rendered).items()


def _ids(root: Path) -> list[str]:
    """Return owner/name of every index file: all of them, not only those that can be read."""
    parts = [path.split("/") for path in tree_files(root)]
    return [
        f"{part[1]}/{part[2].removesuffix('.jsonl')}"
        for part in parts
        if part[0] == "index" and len(part) == 3 and part[2].endswith(".jsonl")
    ]


def _checked_metadata(registry: Registry, release: Release) -> bytes:
    """Return the METADATA of a wheel, after checking the wheel against its index line."""
    wheel = registry.wheel_bytes(release)
    check_bytes(wheel, release)
    contents = read_wheel(wheel, release.wheel.filename)
    check_release(contents, release)
    return contents.metadata


def _check_target(source: Path, target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{str(target)!r} is inside the registry; choose a folder beside it")
    if not target.exists():
        return
    is_view = (target / CATALOG_PATH).is_file() and (target / "simple").is_dir()
    if not target.is_dir() or (any(target.iterdir()) and not is_view):
        raise ConfigError(
            f"{str(target)!r} contains something other than a rendered registry; choose a new "
            "folder"
        )


def _take_place(aside: Path, target: Path) -> None:
    if not target.exists():
        aside.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old / "view")
    aside.rename(target)
    shutil.rmtree(old)
