"""Refuse answers that are too costly for a symbolic comparison, such as towers of powers. Pure.

A comparison is bounded anyway, by processor time; this only keeps a policy that writes such answers
again and again from spending all of it.
"""

import re
from math import prod

from telescope_core.graders.mathematics.notation import MAX_CHARACTERS

_MAX_POWER = 1000
_EXPONENT = re.compile(r"\^[\s{(\\-]*([0-9]+)", re.ASCII)


def is_worth_comparing(answer: str) -> bool:
    """Return whether `answer` is short and free of towers of powers."""
    if len(answer) > MAX_CHARACTERS:
        return False
    exponents = [max(1, int(exponent)) for exponent in _EXPONENT.findall(answer)]
    return prod(exponents) <= _MAX_POWER and not _has_nested_power(answer.replace("**", "^"))


def _has_nested_power(text: str) -> bool:
    """Return whether an exponent holds or is followed by a power, as in `2^{3^4}` or `2^3^4`."""
    inside_exponent = [False]
    expects_exponent = follows_exponent = False
    for character in text:
        if character == "^":
            if inside_exponent[-1] or follows_exponent or expects_exponent:
                return True
            expects_exponent = True
        elif character in "{(":
            inside_exponent.append(inside_exponent[-1] or expects_exponent)
            expects_exponent = follows_exponent = False
        elif character in "})":
            was_exponent = inside_exponent.pop() if len(inside_exponent) > 1 else False
            follows_exponent = was_exponent and not inside_exponent[-1]
            expects_exponent = False
        elif not character.isspace():
            follows_exponent = expects_exponent or (follows_exponent and character.isalnum())
            expects_exponent = False
    return False
