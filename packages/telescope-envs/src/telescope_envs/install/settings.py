"""The settings of an environment, read from its class by the interpreter that can import it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from telescope_envs.install.loading import asked
from telescope_envs.records.release import Setting

_TIME_LIMIT_S = 60.0


def declared_settings(
    interpreter: str, factory: str, search_path: tuple[str, ...] = ()
) -> list[Setting]:
    """Return the settings of `factory`; its code is imported by `interpreter`, not here."""
    return settings_in(
        asked(
            "schema",
            factory,
            interpreter=interpreter,
            search_path=search_path,
            what=factory,
            limit_s=_TIME_LIMIT_S,
        )
    )


def settings_in(schema: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that a JSON schema describes; tables become dotted names."""
    tables = schema.get("$defs", {})
    # A table that holds itself is among the named ones, even at the top.
    top = tables.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return list(_settings(top, tables, ""))


def _settings(
    schema: Mapping[str, Any],
    tables: Mapping[str, Any],
    prefix: str,
    within: tuple[Mapping[str, Any], ...] = (),
) -> Iterator[Setting]:
    within = (*within, schema)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        inner = _table_of(field, tables)
        # A table that holds itself has no end; what is in it is listed once.
        if inner is not None and not any(inner is one for one in within):
            yield from _settings(inner, tables, f"{prefix}{name}.", within)
            continue
        is_required = name in required or "default" not in field
        yield Setting(
            name=f"{prefix}{name}",
            type=_type_of(field, tables),
            default="" if is_required else json.dumps(field["default"]),
            help=" ".join(str(field.get("description", "")).split()),
        )


def _table_of(field: Mapping[str, Any], tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the table that `field` holds, even if it may be null instead; None for no table."""
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        named = tables.get(str(option.get("$ref", "")).rpartition("/")[2])
        if named is not None and "properties" in named:
            return cast(Mapping[str, Any], named)
    return None


def _type_of(
    field: Mapping[str, Any], tables: Mapping[str, Any], within: tuple[str, ...] = ()
) -> str:
    if "$ref" in field:
        name = str(field["$ref"]).rpartition("/")[2]
        if name in within:
            return name
        return _type_of(tables.get(name, {}), tables, (*within, name))
    options = field.get("anyOf") or field.get("allOf")
    if options:
        return " or ".join(_type_of(option, tables, within) for option in options)
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    kind = str(field.get("type", "any"))
    items = field.get("items")
    if kind == "array" and items:
        return f"list of {_type_of(items, tables, within)}"
    names = {"string": "text", "number": "number", "boolean": "true or false", "object": "table"}
    return names.get(kind, kind) + _limits(field)


def _limits(field: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f" {' and '.join(found)}" if found else ""
