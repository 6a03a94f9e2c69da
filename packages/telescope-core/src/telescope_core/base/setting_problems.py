"""Errors of pydantic as one problem for each setting.

Pydantic reports each branch of a union separately, under a location that names the branch. A person
wrote one value, so the branches are combined into one message.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

_LONGEST = 80
_EXPECTED = "Input should be "
_WORDS = {"a valid boolean": "true or false", "a valid array": "a list", "a valid tuple": "a list"}
"""Pydantic's words -> those of a settings file."""


class SettingProblem(NamedTuple):
    """One setting that has an invalid value, or is required and missing."""

    place: tuple[str | int, ...]
    is_missing: bool
    message: str
    """The expectation, such as "should be greater than 0"."""
    got: str
    """The value that was given, as text."""


def problems_of(error: ValidationError, document: Mapping[str, Any]) -> list[SettingProblem]:
    """Return the problems of `document`, one for each place, in the order of their discovery."""
    by_place: dict[tuple[str | int, ...], list[Any]] = {}
    for found in _of_whole_lists(error.errors(include_url=False)):
        by_place.setdefault(_place(found["loc"], document), []).append(found)
    return [
        problem
        for place, found in by_place.items()
        if not _follows_from_others(place, found, by_place)
        for problem in _problems_at(place, found)
    ]


def _of_whole_lists(errors: Sequence[Any]) -> Iterator[Any]:
    """Yield `errors`, with one about a list of a fixed length in place of each item it lacks."""
    sizes: dict[tuple[str | int, ...], int] = {}
    for found in errors:
        *of_list, last = found["loc"] or ("",)
        if found["type"] == "missing" and isinstance(last, int):
            sizes[tuple(of_list)] = last + 1
    for found in errors:
        *of_list, last = found["loc"] or ("",)
        size = sizes.get(tuple(of_list))
        if found["type"] != "missing" or size is None:
            yield found
        elif last == size - 1:
            yield {
                **found,
                "loc": tuple(of_list),
                "type": "too_short",
                "ctx": {"expected": _counted(size)},
            }


def _place(location: tuple[str | int, ...], document: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return `location` up to the value that a person wrote, without the branch of a union."""
    value: Any = document
    for depth, part in enumerate(location):
        if isinstance(value, Mapping):
            value = cast(Mapping[Any, Any], value).get(part, _ABSENT)
        elif isinstance(value, list | tuple) and isinstance(part, int):
            items = cast(Sequence[Any], value)
            value = items[part] if part < len(items) else _ABSENT
        elif value is not _ABSENT:
            return location[:depth]
    return location


_ABSENT = object()


def _follows_from_others(
    place: tuple[str | int, ...], found: Sequence[Any], places: Mapping[tuple[str | int, ...], Any]
) -> bool:
    """Return whether a list seems too short only because of errors in its items."""
    is_short = all(one["type"] == "too_short" for one in found)
    return is_short and any(one[: len(place)] == place for one in places if one != place)


def _problems_at(place: tuple[str | int, ...], found: Sequence[Any]) -> Iterator[SettingProblem]:
    texts = list(dict.fromkeys(_message(one) for one in found))
    if len(texts) > 1 and all(text.startswith("expected ") for text in texts):
        texts = ["expected " + " or ".join(text.removeprefix("expected ") for text in texts)]
    is_missing = found[0]["type"] == "missing"
    for text in texts:
        yield SettingProblem(place, is_missing, text, "nothing" if is_missing else _shown(found[0]))


def _message(found: Any) -> str:
    if found["type"] in ("too_short", "too_long"):
        limits: Mapping[str, Any] = found["ctx"]
        if "expected" in limits:
            return f"expected {limits['expected']}"
        if found["type"] == "too_short":
            return f"expected at least {_counted(limits['min_length'])}"
        return f"expected at most {_counted(limits['max_length'])}"
    message = str(found["msg"]).removeprefix("Value error, ")
    if not message.startswith(_EXPECTED):
        return message
    # The rest of pydantic's message only says that the value is none of these.
    message = message.removeprefix(_EXPECTED).partition(", unable to ")[0]
    message = _WORDS.get(message, message)
    return "expected " + re.sub(r"\b(True|False)\b", lambda found: found[0].lower(), message)


def _counted(num_items: int) -> str:
    return "1 item" if num_items == 1 else f"{num_items} items"


def _shown(found: Any) -> str:
    value = found["input"]
    got = str(value).lower() if isinstance(value, bool) else repr(value)
    return got if len(got) <= _LONGEST else f"{got[: _LONGEST - 3]}..."
