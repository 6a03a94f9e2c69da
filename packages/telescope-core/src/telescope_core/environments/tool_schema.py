"""Build a tool's description for the model: a JSON schema and docstring texts. Pure functions."""

import re
from collections.abc import Collection, Mapping
from functools import reduce
from typing import cast

from telescope_core.base.types import JsonValue

_SECTION = re.compile(
    r"\s*(?:(?:keyword|other)\s+)?(?:args|arguments|params|parameters)\s*(?P<colon>:?)\s*",
    re.IGNORECASE,
)
_DASHES = re.compile(r"\s*-{3,}\s*")
_NAMES = r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_TYPE = reduce(lambda inner, _: rf"(?:[^()]|\({inner}\))*", range(4), "[^()]*")
"""Text with parentheses in parentheses, up to this depth."""
_GOOGLE = re.compile(rf"\s*{_NAMES}\s*(?:\({_TYPE}\)+\s*(?::+|$)|:+)(?:\s+(?P<text>.*)|\s*)")
_NUMPY = re.compile(rf"\s*{_NAMES}\s*(?::.*)?(?P<text>)")
_SPHINX = re.compile(
    r"\s*[:@](?:param|parameter|arg|argument|key|keyword|kwarg)\s+(?:[^:]*[\s*])?"
    r"(?P<names>\w+)\s*:\s*(?P<text>.*)"
)
_FIELD = re.compile(r"\s*[:@]\w+[^:]*:(?:\s|$)")
_SCHEMAS_BY_NAME = ("properties", "$defs")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not")
_DEFINITION = "#/$defs/"

Schema = Mapping[str, JsonValue]


def summary(doc: str) -> str:
    """Return the first paragraph of a docstring as one line, without sections and fields."""
    lines = doc.strip().splitlines()
    for number, line in enumerate(lines):
        head = _SECTION.fullmatch(line)
        if not line.strip() or _FIELD.match(line) or (head and (number or head["colon"])):
            return " ".join(" ".join(lines[:number]).split())
    return " ".join(" ".join(lines).split())


def argument_docs(doc: str, names: Collection[str]) -> dict[str, str]:
    """Return the docstring's text for each of the parameters `names` that it describes.

    Read are the sections of Google and NumPy, for keyword and other arguments too, and the fields
    of Sphinx.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    section: re.Pattern[str] | None = None
    edge, indent = -1, -1
    """Columns of the section's head and of its entries; -1 = not known."""
    lines = doc.splitlines()
    for number, line in enumerate(lines):
        column = len(line) - len(line.lstrip())
        is_dashed = number + 1 < len(lines) and bool(_DASHES.fullmatch(lines[number + 1]))
        head = _SECTION.fullmatch(line)
        field = _SPHINX.fullmatch(line)
        is_entry = section is _GOOGLE and column > edge
        if head and not is_entry and (is_dashed or head["colon"]):
            section, edge, indent, current = _NUMPY if is_dashed else _GOOGLE, column, -1, []
        elif is_dashed or (section is _GOOGLE and line.strip() and column <= edge):
            section, current = None, []
        elif field or _FIELD.match(line):
            section, indent, current = None, column, []
            if field:
                current = _started(found, field, names)
        elif section is None:
            # The description of a field goes on until a paragraph that is not part of it.
            if line.strip() and column <= indent and not lines[number - 1].strip():
                current = []
            current.append(line.strip())
        elif not _DASHES.fullmatch(line) and line.strip():
            indent = column if indent < 0 else indent
            entry = section.fullmatch(line) if column == indent else None
            if entry is not None:
                current = _started(found, entry, names)
            else:
                current.append(line.strip())
    told = {name: " ".join(filter(None, texts)) for name, texts in found.items()}
    return {name: text for name, text in told.items() if text}


def _started(
    found: dict[str, list[str]], entry: re.Match[str], names: Collection[str]
) -> list[str]:
    """Begin the description of an entry's parameters in `found`, and return its lines."""
    lines = [(entry["text"] or "").strip()]
    for one in entry["names"].split(","):
        if (name := one.strip(" *")) in names:
            found.setdefault(name, lines)
    return lines


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
    """Return whether definition `start` refers to `wanted`, directly or through others."""
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
