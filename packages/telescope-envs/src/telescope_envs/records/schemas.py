"""Writes the JSON Schemas of a registry's records, and the first files of an empty registry."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from telescope_core.base.errors import ConfigError
from telescope_envs.records.catalog import CatalogRow
from telescope_envs.records.files import filled, write_atomically, write_file
from telescope_envs.records.model import RecordProblem, converted
from telescope_envs.records.names import check_owner
from telescope_envs.records.release import SCHEMAS, RegistryConfig

ALIASES_TITLE = "# Bare name -> owner/name. A name is never given to another environment.\n"


def schema_files() -> dict[str, str]:
    """Return file name -> text of the files in `schema/`."""
    schemas = {name: msgspec.json.schema(record) for name, record in SCHEMAS.items()}
    schemas["catalog"] = msgspec.json.schema(list[CatalogRow])
    return {
        f"{name}.json": f"{json.dumps(schema, indent=2, sort_keys=True)}\n"
        for name, schema in schemas.items()
    }


def write_schemas(root: Path) -> list[str]:
    """Write the schemas into the registry at `root`; returns the written paths, relative to it."""
    folder = root / "schema"
    for name, text in schema_files().items():
        write_atomically(folder / name, text.encode())
    return [f"schema/{name}" for name in schema_files()]


def config_named(name: str) -> RegistryConfig:
    """Return the `config.json` of a registry with that name; raises ConfigError for a bad one."""
    if not name.strip():
        raise ConfigError(
            f"the name of the registry must have letters, got {name!r}; give a --name"
        )
    try:
        return converted(RegistryConfig, {"name": name})
    except RecordProblem as problem:
        raise ConfigError(
            f"the name of the registry, {name[:80]!r}, is not one line of text that clients accept "
            f"({problem}); give another --name"
        ) from None


def create_registry(folder: Path, *, owners: Sequence[str], name: str) -> list[str]:
    """Write a registry into `folder`, which must be new or empty; returns its paths, sorted."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not empty; give a new folder")
    config = config_named(name).as_table()
    files = {
        "config.json": f"{json.dumps(config, indent=2)}\n",
        "aliases.toml": f"{ALIASES_TITLE}[aliases]\n",
        "reserved.txt": "# Names that nobody may publish under, one per line.\n",
    }
    for owner in owners:
        check_owner(owner)
        files[f"namespaces/{owner}.toml"] = f'owner = "{owner}"\nstatus = "active"\n'
    with filled(folder):
        for path, text in files.items():
            write_file(folder / path, text.encode())
        (folder / "index").mkdir()
    return sorted(files)
