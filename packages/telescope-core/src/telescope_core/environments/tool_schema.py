"""Build what a model reads about a tool: a JSON schema and docstring texts. Pure functions."""

import re
from collections.abc import Mapping
from typing import cast

from telescope_core.types import JsonValue

_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
_SCHEMAS_BY_NAME = ("properties", "$defs")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not")
_DEFINITION = "#/$defs/"

Schema = Mapping[str, JsonValue]


def summary(doc: str) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(doc.strip().split("\n\n", 1)[0].split())


def argument_docs(doc: str) -> dict[str, str]:
    """Return the description of each parameter, from an `Args:` section or `:param x:` lines."""
    found: dict[str, str] = {}
    is_section, indent, current = False, 0, ""
    for line in doc.splitlines():
        entry = _ENTRY.match(line) if is_section else None
        field = _FIELD.match(line.strip())
        if _SECTION.match(line):
            is_section, indent, current = True, 0, ""
        elif is_section and line and not line.startswith(" "):
            is_section, current = False, ""
        elif entry and len(entry[1]) <= (indent or len(entry[1])):
            indent, current = len(entry[1]), entry[2]
            found[current] = entry[3].strip()
        elif field:
            found[field[1]] = field[2].strip()
        elif current:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return {name: text for name, text in found.items() if text}


def simplified(schema: Schema) -> dict[str, JsonValue]:
    """Return `schema` without titles and, unless it is recursive, with its references inlined."""
    definitions = cast(Mapping[str, Schema], schema.get("$defs") or {})
    if any(_refers(definitions, name, name) for name in definitions):
        return _rewritten(schema, {})
    flat = {key: value for key, value in schema.items() if key != "$defs"}
    return _rewritten(flat, definitions)


def _rewritten(schema: Schema, definitions: Mapping[str, Schema]) -> dict[str, JsonValue]:
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix(_DEFINITION) in definitions:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        named = definitions[reference.removeprefix(_DEFINITION)]
        return _rewritten({**named, **beside}, definitions)
    found: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME:
            inner = cast(Mapping[str, Schema], value)
            found[key] = {name: _rewritten(one, definitions) for name, one in inner.items()}
        elif key in _SCHEMA_LISTS:
            found[key] = [_rewritten(one, definitions) for one in cast(list[Schema], value)]
        elif key in _SCHEMAS and isinstance(value, Mapping):
            found[key] = _rewritten(value, definitions)
        elif key != "title":
            found[key] = value
    return found


def _refers(definitions: Mapping[str, Schema], start: str, wanted: str) -> bool:
    """Whether definition `start` refers to `wanted`, directly or through other definitions."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        text = str(definitions[pending.pop()])
        for name in definitions:
            if f"'{_DEFINITION}{name}'" not in text:
                continue
            if name == wanted:
                return True
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return False
