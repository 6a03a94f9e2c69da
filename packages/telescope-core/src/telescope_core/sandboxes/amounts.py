"""Amounts of resources: whether a value is valid, and whether a provider can supply it.

An invalid amount, such as half a process, is an error for any provider. An amount that one provider
cannot supply may be possible at another, so it is refused when a sandbox is created, by
`errors.require_limits`.
"""

import math
from dataclasses import dataclass

from telescope_core.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAmount:
    """The amounts of one resource that a provider can supply."""

    most: int
    why_most: str
    """The reason for `most`, as in "this machine has 8"."""
    least: float = 0
    why_least: str = ""
    multiple_of: int = 0
    """Step of possible amounts; 0 = any amount."""

    def refusal(self, value: float) -> str:
        """Return why `value` cannot be supplied, as in "at most 8, ..."; empty if it can."""
        if value > self.most:
            return f"at most {self.most}, {self.why_most}"
        if value < self.least:
            return f"at least {self.least:g}, {self.why_least}"
        if self.multiple_of and value % self.multiple_of:
            return f"only multiples of {self.multiple_of}"
        return ""


ANY_CPUS = ResourceAmount(most=1 << 20, why_most="beyond which there is no machine")
ANY_MB = ResourceAmount(most=1 << 31, why_most="beyond which there is no machine")
"""2 PiB; services count MiB in 32 bits."""
ANY_SECONDS = ResourceAmount(most=2**31 - 61, why_most="the most that its timer counts")
"""68 years, with a minute to spare."""


def require_amount(name: str, value: object, *, is_whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number above 0, and a whole one if it must be.

    `name`: name for errors, such as "memory_mb of a sandbox".
    """
    kind = "a whole number" if is_whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be {kind}, got {value!r}")
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value!r}")
    if isinstance(value, float) and (is_whole or math.isinf(value)):
        raise ConfigError(f"{name} must be {kind if is_whole else 'finite'}, got {value!r}")


def whole_units(value: float | None, unit: int) -> int | None:
    """Return an amount in the whole units that a service counts in; None stays None."""
    return None if value is None else int(value // unit)
