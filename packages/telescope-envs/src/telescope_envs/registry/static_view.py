"""Files to which a registry is rendered, for hosts that only serve files.

These are the registry's own, `v1/index.json` for clients that cannot list folders, and the simple
index, with which plain `pip` and `uv` install: PEP 503 HTML and PEP 691 JSON, which a server makes
here as well. All text written by publishers is escaped, and URLs are relative or http(s), so an
index line cannot inject a script into a page. Equal registries give equal bytes. A view is written
to a temporary folder that then replaces an older view by renaming, so a host never serves half.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from packaging.utils import canonicalize_name
from packaging.version import Version

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.catalog import CATALOG_PATH, CatalogRow, catalog_row, write_catalog
from telescope_envs.records.files import write_file
from telescope_envs.records.names import distribution_name, module_name
from telescope_envs.records.reading import (
    REMOVED_PATH,
    ids_of,
    is_registry_path,
    is_web_address,
    metadata_path,
    parse_removals,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import Release, Status
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.stores import ListedStore
from telescope_envs.registry.stores.folder import LocalStore
from telescope_envs.rules.admission import Read
from telescope_envs.rules.wheel import read_release

_GENERATED = ("v1", "simple")
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_API_VERSION = "1.1"
_KINDS = {"html": False, "json": True}
"""Ending of a page's file -> whether it is JSON."""
_SIMPLE_HEAD = f'<meta name="pypi:repository-version" content="{_API_VERSION}">\n'


class SimpleFile(NamedTuple):
    """One wheel as a package index lists it."""

    release: Release
    url: str
    metadata_sha256: str
    """Hash of the file at `url` + `.metadata`; empty if there is no such file."""
    yanked: str | None
    """The reason why it was yanked; None if it was not."""


def simple_files(
    releases: Sequence[Release], status: Status, *, to_root: str, has_metadata: bool
) -> list[SimpleFile]:
    """Return the wheels of one environment, oldest version first.

    `to_root` is the relative path from the page to the root of the registry, such as `../../`. A
    wheel is omitted if none of its URLs may appear on a page.
    """
    files: list[SimpleFile] = []
    for release in sorted(releases, key=lambda one: Version(one.version)):
        address = _address(release)
        if not address:
            continue
        is_inside = is_registry_path(address)
        url = to_root + quote(address) if is_inside else address
        metadata = release.wheel.metadata_sha256 if is_inside and has_metadata else ""
        files.append(SimpleFile(release, url, metadata, status.yanked.get(release.version)))
    return files


def projects_page(projects: Sequence[str], *, is_json: bool) -> str:
    """Return the page that lists all distributions: HTML with links to their pages, or JSON."""
    names = sorted(projects)
    if is_json:
        return _json({"projects": [{"name": name} for name in names]})
    links = [f'<a href="{quote(name)}/">{escape(name)}</a><br>' for name in names]
    return html_page("Simple index", links, head=_SIMPLE_HEAD)


def project_page(project: str, files: Sequence[SimpleFile], *, is_json: bool) -> str:
    """Return the page of one distribution: HTML, or JSON."""
    if not is_json:
        return html_page(f"Links for {project}", [_link(file) for file in files], head=_SIMPLE_HEAD)
    versions = list(dict.fromkeys(file.release.version for file in files))
    listed = [_as_json(file) for file in files]
    return _json({"name": project, "versions": versions, "files": listed})


def _address(release: Release) -> str:
    """Return the wheel URL for a page: in the registry if any, else http(s); empty if neither."""
    inside = filter(is_registry_path, release.wheel.urls)
    return next(inside, next(filter(is_web_address, release.wheel.urls), ""))


def _link(file: SimpleFile) -> str:
    attributes = {
        "href": f"{file.url.partition('#')[0]}#sha256={file.release.wheel.sha256}",
        "data-requires-python": file.release.requires_python,
    }
    if file.metadata_sha256:
        attributes["data-core-metadata"] = f"sha256={file.metadata_sha256}"
    if file.yanked is not None:
        attributes["data-yanked"] = file.yanked
    shown = " ".join(f'{key}="{escape(value)}"' for key, value in attributes.items())
    return f"<a {shown}>{escape(file.release.wheel.filename)}</a><br>"


def _as_json(file: SimpleFile) -> Mapping[str, object]:
    release, wheel = file.release, file.release.wheel
    return {
        "filename": wheel.filename,
        "url": file.url,
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "upload-time": f"{release.published_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        "requires-python": release.requires_python,
        "core-metadata": {"sha256": file.metadata_sha256} if file.metadata_sha256 else False,
        "yanked": (file.yanked or True) if file.yanked is not None else False,
    }


def html_page(title: str, lines: Sequence[str], *, head: str = "") -> str:
    """Return a page of `lines`, which are HTML, as is `head`; `title` is text."""
    body = "".join(f"{line}\n" for line in lines)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Phones show a page that is as wide as a desk's otherwise.
        f'<meta name="viewport" content="width=device-width">\n{head}'
        f"<title>{escape(title)}</title>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}</body>\n</html>\n"
    )


def _json(content: Mapping[str, object]) -> str:
    return f"{json.dumps({'meta': {'api-version': _API_VERSION}, **content}, indent=1)}\n"


def pages_of(
    environment_id: str, releases: Sequence[Release], status: Status, *, has_metadata: bool
) -> dict[str, bytes]:
    """Return path -> bytes of the pages of one environment's distribution."""
    project = project_of(environment_id)
    files = simple_files(releases, status, to_root="../../", has_metadata=has_metadata)
    return {
        f"simple/{project}/index.{kind}": project_page(project, files, is_json=is_json).encode()
        for kind, is_json in _KINDS.items()
    }


def front_pages(ids: Iterable[str]) -> dict[str, bytes]:
    """Return path -> bytes of the pages that list the distributions of these environments."""
    projects = [project_of(one) for one in ids]
    return {
        f"simple/index.{kind}": projects_page(projects, is_json=is_json).encode()
        for kind, is_json in _KINDS.items()
    }


def project_of(environment_id: str) -> str:
    """Return the normalized name of an environment's distribution, as in the URLs of pages."""
    return canonicalize_name(distribution_name(*environment_id.split("/", 1)))


def derived_files(read: Read, rows: Sequence[CatalogRow], environment_id: str) -> dict[str, bytes]:
    """Return path -> bytes of the files to write when the records of one environment change.

    A registry that runs no code, such as a repository of files, receives them in the same commit as
    the records that they are generated from. `read` returns the records after the change; `rows`
    are the catalog rows before it.
    """
    index, status = f"index/{environment_id}.jsonl", f"status/{environment_id}.json"
    after = [row for row in rows if row.id != environment_id]
    changed = catalog_row(environment_id, read(index) or b"", read(status)).row
    if changed is not None:
        after = sorted([*after, changed], key=lambda row: row.id)
    releases = read_releases(read(index) or b"", environment_id, index).releases
    said = parse_status(read(status), status)
    return {
        CATALOG_PATH: write_catalog(after),
        **pages_of(environment_id, releases, said, has_metadata=False),
        **front_pages(row.id for row in after),
    }


def render(
    source: Path,
    target: Path,
    *,
    store: ListedStore | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> int:
    """Write the static view of the registry at `source` to `target`; returns the number of files.

    `store` reads it; None for a folder of its files. What is withheld is left out. `target` must be
    new, empty, or an older view. Raises RegistryError if a record or wheel of the registry is
    invalid; `target` is then unchanged.
    """
    _check_target(source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        count = 0
        for path, data in rendered_files(store or LocalStore(source), progress=progress):
            write_file(aside / path, data)
            count += 1
        aside.chmod(0o755)
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        if target.exists():
            target.rename(old / "view")
        aside.rename(target)
        shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return count


def rendered_files(
    store: ListedStore, *, progress: Callable[[str], None] = lambda step: None
) -> Iterator[tuple[str, bytes]]:
    """Yield the path and bytes of every file of the view, beginning with the registry's files."""
    registry, files = Registry(store), store.listing()
    ids = ids_of(files.paths)
    owners = {one: registry.namespace(one.partition("/")[0]) for one in ids}
    withheld = {one for one, owner in owners.items() if owner is not None and owner.is_withheld}
    hidden = tuple(f"{module_name(*one.split('/', 1))}-" for one in withheld)
    for path in files.paths:
        is_made_here = path.partition("/")[0] in _GENERATED or path.endswith(metadata_path(""))
        if not is_made_here and not path.rpartition("/")[2].startswith(hidden):
            yield path, files.read(path)
    rows = [row for row in registry.catalog() if row.id not in withheld]
    yield CATALOG_PATH, write_catalog(rows)
    rendered: list[str] = []
    removals = parse_removals(registry.store.read(REMOVED_PATH))
    for environment_id in (one for one in ids if one not in withheld):
        progress(f"rendering {environment_id}")
        releases, unreadable = registry.read_releases(environment_id)
        if unreadable:
            raise RegistryError(unreadable[0].why)
        releases = [release for release in releases if not removals.has(release)]
        if not releases:
            continue
        rendered.append(environment_id)
        for release in releases:
            inside = [url for url in release.wheel.urls if is_registry_path(url)]
            if inside:
                metadata = read_release(registry.wheel_bytes(release), release).metadata
                yield from ((metadata_path(url), metadata) for url in inside)
        status = registry.status(environment_id)
        yield from pages_of(environment_id, releases, status, has_metadata=True).items()
    yield from front_pages(rendered).items()


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
