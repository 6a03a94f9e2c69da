"""Reads JSON that a person writes on a command line, as strictly as the standard defines it."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

from telescope_core.base.types import JsonValue


def read_json(text: str) -> JsonValue:
    """Return the value of `text`.

    Raises ValueError with the reason, also for what Python's json would accept or change: a key
    that is given twice, numbers that are not finite, and a depth that it cannot read.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=object_of, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return cast(JsonValue, value)


def object_of(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raises ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {name!r} twice; keep one of them")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number of 64 bits")
    return number
