"""Check whether a JSON Schema is valid, and make an example value for it. Pure.

It knows the keywords that tools and settings use, and ignores any other, as the standard asks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_TEXTS = {"title", "description", "$ref", "pattern", "format", "$schema", "$comment"}
_SCHEMAS_BY_NAME = {"properties", "$defs", "definitions", "patternProperties"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then"}
_MAX_DEPTH = 12
_WRONG = object()
_UUID = "3f2b8c1e-5d4a-4e6f-9a7b-1c2d3e4f5a6b"
_OF_FORMAT = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T09:30:00Z",
    "time": "09:30:00Z",
    "duration": "PT1H30M",
    "uuid": _UUID,
    "uuid4": _UUID,
    "email": "ada@example.com",
    "uri": "https://example.com/",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "ipvanyaddress": "192.0.2.1",
}
"""An example of each format of JSON Schema and pydantic that any text would not have."""
_ANY_TEXT = {"password", "binary", "path", "regex", "base64", "base64url"}
"""Formats that the text of `_text` has."""


class NoExampleError(ValueError):
    """No value can be made, because the schema does not say enough about a text."""


def schema_problems(schema: object) -> list[str]:
    """Return the problems of `schema`, each with its place; empty when it is valid."""
    return list(_problems(schema, "schema", schema))


def _problems(schema: object, where: str, root: object) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where}: expected an object, got {schema!r:.80}"
        return
    plain = cast(Mapping[str, Any], schema)
    yield from _wrong_lists(plain, where)
    yield from _wrong_values(plain, where)
    reference = plain.get("$ref")
    if isinstance(reference, str) and _target(reference, root) is None:
        yield f"{where}.$ref: {reference!r} does not exist"
    for key, value in plain.items():
        for name, inner in _inner(key, value):
            if inner is _WRONG:
                yield f"{where}.{name}: expected schemas, got {value!r:.80}"
            else:
                yield from _problems(inner, f"{where}.{name}", root)


def _inner(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the schemas inside one keyword with their paths; `_WRONG` where one is missing."""
    if key in _SCHEMAS_BY_NAME:
        if not isinstance(value, Mapping):
            yield key, _WRONG
            return
        for name, inner in cast(Mapping[str, object], value).items():
            yield f"{key}.{name}", inner
    elif key in _SCHEMA_LISTS:
        if not isinstance(value, list | tuple) or not value:
            yield key, _WRONG
            return
        for index, inner in enumerate(cast(Sequence[object], value)):
            yield f"{key}[{index}]", inner
    elif key in _SCHEMAS:
        yield key, value


def _wrong_lists(schema: Mapping[str, Any], where: str) -> Iterator[str]:
    kinds = schema.get("type", [])
    for kind in cast(list[object], [kinds] if isinstance(kinds, str) else kinds):
        if kind not in _TYPES:
            yield f"{where}.type: {kind!r} is not one of {', '.join(sorted(_TYPES))}"
    required = schema.get("required", [])
    names = cast(Sequence[object], required) if isinstance(required, list | tuple) else (None,)
    known = schema.get("properties")
    if not all(isinstance(name, str) for name in names):
        yield f"{where}.required: expected a list of names, got {required!r:.80}"
    elif isinstance(known, Mapping):
        missing = [str(name) for name in names if name not in known]
        if missing:
            yield f"{where}.required: {', '.join(missing)} missing from the properties"
    if "enum" in schema and not (isinstance(schema["enum"], list | tuple) and schema["enum"]):
        yield f"{where}.enum: expected a list of values, got {schema['enum']!r:.80}"


def _wrong_values(schema: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, value in schema.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _NUMBERS and not is_number:
            yield f"{where}.{key}: expected a number, got {value!r:.80}"
        elif key in _COUNTS and not (isinstance(value, int) and value >= 0):
            yield f"{where}.{key}: expected a count, got {value!r:.80}"
        elif key in _TEXTS and not isinstance(value, str):
            yield f"{where}.{key}: expected text, got {value!r:.80}"


def _target(reference: str, root: object) -> object | None:
    found = root
    for part in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ["?"]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = cast(Mapping[str, object], found)[key]
    return found


def example_of(schema: object, root: object | None = None, depth: int = 0) -> Any:
    """Return a small, simple value that `schema` describes; raises NoExampleError."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    plain = cast(Mapping[str, Any], schema)
    if isinstance(plain.get("$ref"), str):
        return example_of(_target(plain["$ref"], root), root, depth + 1)
    for key in ("const", "default"):
        if key in plain:
            return plain[key]
    for key in ("examples", "enum"):
        if plain.get(key):
            return plain[key][0]
    choices = plain.get("anyOf") or plain.get("oneOf") or (plain.get("allOf") or ())[:1]
    for index, choice in enumerate(choices):
        try:
            return example_of(choice, root, depth + 1)
        except NoExampleError:
            if index + 1 == len(choices):
                raise
    kinds = plain.get("type", "object" if "properties" in plain else "null")
    kind = kinds if isinstance(kinds, str) else next(iter(kinds), "null")
    return _of_type(kind, plain, root, depth)


def _of_type(kind: str, schema: Mapping[str, Any], root: object, depth: int) -> Any:
    if kind == "object":
        known = cast(Mapping[str, object], schema.get("properties") or {})
        return {
            name: example_of(known.get(name), root, depth + 1)
            for name in schema.get("required") or ()
        }
    if kind == "array":
        inner = [example_of(one, root, depth + 1) for one in schema.get("prefixItems") or ()]
        wanted = max(int(schema.get("minItems", 1)) - len(inner), 0) if "items" in schema else 0
        return [*inner, *(example_of(schema["items"], root, depth + 1) for _ in range(wanted))]
    if kind in ("integer", "number"):
        return _number(schema, is_whole=kind == "integer")
    if kind == "string":
        return _text(schema)
    return False if kind == "boolean" else None


def _text(schema: Mapping[str, Any]) -> str:
    form = schema.get("format")
    length = int(schema.get("minLength", 1))
    text = ("text" + "x" * length)[: max(length, min(4, int(schema.get("maxLength", 4))))]
    if form in _OF_FORMAT:
        text = _OF_FORMAT[form]
    elif form is not None and form not in _ANY_TEXT:
        raise NoExampleError(f"a text of the format {form!r}")
    pattern = schema.get("pattern")
    try:
        if pattern is not None and not re.search(pattern, text):
            raise NoExampleError(f"a text of the pattern {pattern!r:.80}")
    except re.error:  # other programs know patterns that Python does not
        raise NoExampleError(f"a text of the pattern {pattern!r:.80}") from None
    return text


def _number(schema: Mapping[str, Any], *, is_whole: bool) -> float:
    low = schema.get("minimum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + (1 if is_whole else 1e-3)
    high = schema.get("maximum")
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - (1 if is_whole else 1e-3)
    number: float = 1
    if low is not None and number < low:
        number = low
    if high is not None and number > high:
        number = high
    step = schema.get("multipleOf")
    if step:
        number = -(-number // step) * step
    return int(number) if is_whole else number
