"""Generates the JSON Schemas of a registry's records from the models that read them."""

import json
from pathlib import Path

import msgspec

from telescope_envs.registry.catalog import CatalogRow
from telescope_envs.registry.records import SCHEMAS


def schema_files() -> dict[str, str]:
    """Return file name -> text of the files in `schema/`."""
    schemas = {name: record.model_json_schema(by_alias=True) for name, record in SCHEMAS.items()}
    schemas["catalog"] = msgspec.json.schema(list[CatalogRow])
    return {
        f"{name}.json": f"{json.dumps(schema, indent=2, sort_keys=True)}\n"
        for name, schema in schemas.items()
    }


def write_schemas(root: Path) -> list[str]:
    """Write the schemas into the registry at `root`; returns the written paths, relative to it."""
    folder = root / "schema"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_files().items():
        (folder / name).write_text(text)
    return [f"schema/{name}" for name in schema_files()]
