"""Reads TOML and JSON that somebody else wrote: whatever is wrong with it is one kind of error.

The parsers of the standard library fail in several ways: by their own error, by one about UTF-8, by
recursion on deep nesting, and by the length of a number.
"""

import json
import tomllib
from collections.abc import Callable
from typing import TypeVar

Document = TypeVar("Document")


def read_toml(data: str | bytes) -> dict[str, object]:
    """Return the tables of a TOML document; raises ValueError with the reason."""
    return _read(lambda: tomllib.loads(data if isinstance(data, str) else data.decode()))


def read_json(data: str | bytes) -> object:
    """Return a JSON document; raises ValueError with the reason."""
    return _read(lambda: json.loads(data if isinstance(data, str) else data.decode()))


def _read(parse: Callable[[], Document]) -> Document:
    try:
        return parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
