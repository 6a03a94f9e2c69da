"""Find JSON objects and arrays in text, alone, in a code block or between sentences."""

import json
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError

from telescope_core.base.types import JsonValue

Model = TypeVar("Model", bound=BaseModel)
JsonContainer = dict[str, JsonValue] | list[JsonValue]
_MAX_TRIES = 10_000
"""Most brackets at which parsing is tried, so that text full of brackets cannot take long."""
_TRIES_OF_DEEP = 100
"""Number of tries that a deeply nested bracket counts as, because it takes longer."""


def json_values(text: str) -> list[JsonContainer]:
    """Return the outermost JSON objects and arrays in `text`, in order.

    Text that is not JSON is skipped, and so are brackets that are nested too deeply for this Python
    to parse. NaN and infinities are not JSON. The search ends after 10,000 attempts.
    """
    found: list[JsonContainer] = []
    decoder = json.JSONDecoder(parse_constant=_refuse)
    position = tries = 0
    while tries < _MAX_TRIES:
        found_at = (text.find(bracket, position) for bracket in "{[")
        start = min((at for at in found_at if at >= 0), default=-1)
        if start < 0:
            break
        tries += 1
        try:
            value, position = cast(tuple[JsonContainer, int], decoder.raw_decode(text, start))
            found.append(value)
        except ValueError:
            position = start + 1
        except RecursionError:
            # Each bracket of the run would be tried, and all but the last would fail like this.
            position = len(text) - len(text[start:].lstrip(f"{text[start]} \n\t"))
            tries += _TRIES_OF_DEEP
    return found


def last_json(text: str) -> JsonContainer | None:
    """Return the last object or array in `text`; None when there is none."""
    found = json_values(text)
    return found[-1] if found else None


def as_model(text: str, model: type[Model]) -> Model:
    """Return the last JSON object in `text` that is a valid `model`, as an instance of it.

    Raises ValueError when there is none.
    """
    objects = [value for value in json_values(text) if isinstance(value, dict)]
    if not objects:
        raise ValueError(f"expected a JSON object with {_fields(model)}, got {text[:200]!r}")
    problem = ""
    for value in reversed(objects):
        try:
            return model.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            problem = problem or f"{place}: {first['msg']}, got {first['input']!r:.80}"
    raise ValueError(f"expected a JSON object with {_fields(model)}; {problem}")


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
