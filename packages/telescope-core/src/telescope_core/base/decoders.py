"""Decoders of msgspec that several threads may build at once.

msgspec prepares a class, and those of its fields, when a decoder of it is built for the first time.
Where two threads do so together, the process ends with a segmentation fault and without a word, or
a decoder refuses what is right (msgspec 0.22). So one thread at a time builds them.
"""

import threading
from functools import cache
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
_BUILDING = threading.RLock()
"""Held again by the same thread where the annotations of a class build another decoder."""


def json_decoder(kind: type[Kind]) -> "msgspec.json.Decoder[Kind]":
    """Return a decoder of JSON that holds a `kind`."""
    with _BUILDING:
        return msgspec.json.Decoder(kind)


def convert(value: object, kind: type[Kind], **options: Any) -> Kind:
    """Return `value`, made of what JSON holds, as a `kind`, as `msgspec.convert` does."""
    _prepare(kind)
    return msgspec.convert(value, kind, **options)


@cache
def _prepare(kind: type) -> None:
    json_decoder(kind)
