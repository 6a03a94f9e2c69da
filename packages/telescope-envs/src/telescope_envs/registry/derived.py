"""Generates the files that derive from the records: the catalog and the simple index pages.

A registry that runs no code, such as a repository of files, receives them in the same commit as the
records that they are generated from.
"""

from collections.abc import Sequence

from telescope_envs.registry.admission import Read
from telescope_envs.registry.catalog import CATALOG_PATH, CatalogRow, catalog_row, write_catalog
from telescope_envs.registry.names import distribution_name, plain
from telescope_envs.registry.parsing import FULL_READERS, parse_status, read_releases
from telescope_envs.registry.render import (
    project_html,
    project_json,
    projects_html,
    projects_json,
    simple_files,
)


def derived_files(read: Read, rows: Sequence[CatalogRow], environment_id: str) -> dict[str, bytes]:
    """Return path -> bytes of the files to write when the records of one environment change.

    `read` returns the records after the change; `rows` are the catalog rows before it.
    """
    index, status = f"index/{environment_id}.jsonl", f"status/{environment_id}.json"
    after = [row for row in rows if row.id != environment_id]
    changed = catalog_row(environment_id, read(index) or b"", read(status), full=FULL_READERS).row
    if changed is not None:
        after = sorted([*after, changed], key=lambda row: row.id)
    releases = read_releases(read(index) or b"", environment_id, index).releases
    files = simple_files(
        releases, parse_status(read(status), status), to_root="../../", has_metadata=False
    )
    project = plain(distribution_name(*environment_id.split("/", 1)))
    projects = [plain(distribution_name(*row.id.split("/", 1))) for row in after]
    return {
        CATALOG_PATH: write_catalog(after),
        f"simple/{project}/index.html": project_html(project, files).encode(),
        f"simple/{project}/index.json": project_json(project, files).encode(),
        "simple/index.html": projects_html(projects).encode(),
        "simple/index.json": projects_json(projects).encode(),
    }
