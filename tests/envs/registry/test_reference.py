"""docs/reference/registry-format.md names every field and every check."""

import re
from pathlib import Path

import msgspec

from telescope_envs.records.catalog import CatalogRow
from telescope_envs.records.release import SCHEMAS
from telescope_envs.rules.tree import CHECKS

PAGE = (Path(__file__).parents[3] / "docs/reference/registry-format.md").read_text()
NAMED = set(re.findall(r"`\[?([a-z0-9_.-]+)\]?`", PAGE))


def fields_of(record: type[msgspec.Struct]) -> set[str]:
    """Return the names of the fields of a record and of the records inside it."""
    names: set[str] = set()
    for field in msgspec.structs.fields(record):
        names.add(field.encode_name)
        inner = (field.type, *getattr(field.type, "__args__", ()))
        for part in inner:
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                names |= fields_of(part)
    return names


def test_every_field_is_on_the_page():
    fields = {field.name for field in msgspec.structs.fields(CatalogRow)}
    for record in SCHEMAS.values():
        fields |= fields_of(record)
    assert fields - NAMED == set()
    assert {"schema", "replacement", "metadata_sha256", "kind"} <= fields


def test_every_check_is_on_the_page_as_it_is_in_the_table():
    assert [line for line in map(as_row, CHECKS) if line not in PAGE.splitlines()] == []


def as_row(check: str) -> str:
    return f"| `{check}` | {CHECKS[check]} |"
