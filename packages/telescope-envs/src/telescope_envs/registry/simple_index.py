"""The simple index, with which plain `pip` and `uv` install: PEP 503 HTML and PEP 691 JSON.

The functions turn records into text for static hosts, for repositories of files and for the server.
All text written by publishers is escaped, and URLs are relative or http(s), so an index line cannot
inject a script into a page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from html import escape
from urllib.parse import quote

from packaging.version import Version

from telescope_envs.records.catalog import (
    CATALOG_PATH,
    CatalogRow,
    catalog_row,
    write_catalog,
)
from telescope_envs.records.names import (
    distribution_name,
    plain,
)
from telescope_envs.records.reading import (
    is_registry_path,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import (
    Release,
    Status,
)
from telescope_envs.rules.admission import Read

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
_API_VERSION = "1.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleFile:
    """One wheel as a package index lists it."""

    filename: str
    version: str
    url: str
    sha256: str
    size: int
    """Bytes."""
    requires_python: str
    upload_time: str
    """ISO 8601, UTC."""
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
        files.append(
            SimpleFile(
                filename=release.wheel.filename,
                version=release.version,
                url=to_root + quote(address) if is_inside else address,
                sha256=release.wheel.sha256,
                size=release.wheel.size,
                requires_python=release.requires_python,
                upload_time=f"{release.published_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
                metadata_sha256=(
                    release.wheel.metadata_sha256 if is_inside and has_metadata else ""
                ),
                yanked=status.yanked.get(release.version),
            )
        )
    return files


def projects_html(projects: Sequence[str]) -> str:
    """Return the page that lists all distributions and links to their pages."""
    links = [f'<a href="{quote(name)}/">{escape(name)}</a><br>' for name in sorted(projects)]
    return _page("Simple index", links)


def projects_json(projects: Sequence[str]) -> str:
    """Return the list of all distributions as JSON."""
    listed = [{"name": name} for name in sorted(projects)]
    return _json({"meta": {"api-version": _API_VERSION}, "projects": listed})


def project_html(project: str, files: Sequence[SimpleFile]) -> str:
    """Return the page of one distribution."""
    return _page(f"Links for {project}", [_link(file) for file in files])


def project_json(project: str, files: Sequence[SimpleFile]) -> str:
    """Return the page of one distribution as JSON."""
    return _json(
        {
            "meta": {"api-version": _API_VERSION},
            "name": project,
            "versions": list(dict.fromkeys(file.version for file in files)),
            "files": [_as_json(file) for file in files],
        }
    )


def _address(release: Release) -> str:
    """Return the wheel URL for a page: in the registry if any, else http(s); empty if neither."""
    inside = [url for url in release.wheel.urls if is_registry_path(url)]
    outside = [url for url in release.wheel.urls if url.startswith(("https://", "http://"))]
    return next(iter((*inside, *outside)), "")


def _link(file: SimpleFile) -> str:
    attributes = {
        "href": f"{file.url.partition('#')[0]}#sha256={file.sha256}",
        "data-requires-python": file.requires_python,
    }
    if file.metadata_sha256:
        attributes["data-core-metadata"] = f"sha256={file.metadata_sha256}"
    if file.yanked is not None:
        attributes["data-yanked"] = file.yanked
    shown = " ".join(f'{key}="{escape(value)}"' for key, value in attributes.items())
    return f"<a {shown}>{escape(file.filename)}</a><br>"


def _as_json(file: SimpleFile) -> Mapping[str, object]:
    return {
        "filename": file.filename,
        "url": file.url,
        "hashes": {"sha256": file.sha256},
        "size": file.size,
        "upload-time": file.upload_time,
        "requires-python": file.requires_python,
        "core-metadata": {"sha256": file.metadata_sha256} if file.metadata_sha256 else False,
        "yanked": (file.yanked or True) if file.yanked is not None else False,
    }


def _page(title: str, lines: Sequence[str]) -> str:
    body = "".join(f"{line}\n" for line in lines)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="pypi:repository-version" content="{_API_VERSION}">\n'
        f"<title>{escape(title)}</title>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}</body>\n</html>\n"
    )


def _json(value: Mapping[str, object]) -> str:
    return f"{json.dumps(value, indent=1)}\n"


def pages_of(
    environment_id: str, releases: Sequence[Release], status: Status, *, has_metadata: bool
) -> dict[str, bytes]:
    """Return path -> bytes of the pages of one environment's distribution."""
    project = project_of(environment_id)
    files = simple_files(releases, status, to_root="../../", has_metadata=has_metadata)
    return {
        f"simple/{project}/index.html": project_html(project, files).encode(),
        f"simple/{project}/index.json": project_json(project, files).encode(),
    }


def front_pages(ids: Iterable[str]) -> dict[str, bytes]:
    """Return path -> bytes of the pages that list the distributions of these environments."""
    projects = [project_of(one) for one in ids]
    return {
        "simple/index.html": projects_html(projects).encode(),
        "simple/index.json": projects_json(projects).encode(),
    }


def project_of(environment_id: str) -> str:
    """Return the normalized name of an environment's distribution, as in the URLs of pages."""
    return plain(distribution_name(*environment_id.split("/", 1)))


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
