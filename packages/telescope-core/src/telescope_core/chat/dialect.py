"""`Dialect`: the field names and settings that one endpoint accepts for one model.

Some endpoints refuse `max_tokens` and want `max_completion_tokens`, and some models take no
temperature. The first refusal says so; every later request is then written accordingly.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from telescope_core.base.attempts import says_too_long
from telescope_core.base.errors import EndpointError

_OLD, _NEW = "max_tokens", "max_completion_tokens"
_REFUSALS = (400, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The way in which one endpoint wants the fields of a request to be written."""

    is_new_name: bool = False
    """Whether the token limit is named `max_completion_tokens`."""
    left_out: frozenset[str] = frozenset()
    """Fields that the endpoint does not accept."""

    def written(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request in this dialect."""
        kept = {name: value for name, value in fields.items() if name not in self.left_out}
        if self.is_new_name and _OLD in kept:
            kept.setdefault(_NEW, kept[_OLD])
            del kept[_OLD]
        return kept

    def learned(self, refusal: EndpointError, optional: Collection[str]) -> "Dialect | None":
        """Return the dialect that a refusal calls for; None if it calls for no other one.

        Only fields in `optional` may be left out. Each refusal adds to the dialect or ends the
        request, so that a request is repeated at most once for the name and each optional field.
        """
        # vLLM names both forms of the limit where the prompt is too long for any limit.
        if refusal.status not in _REFUSALS or says_too_long(refusal.answer):
            return None
        if not self.is_new_name and _NEW in refusal.answer:
            return replace(self, is_new_name=True)
        named = {name for name in optional if name in refusal.answer} - self.left_out
        return replace(self, left_out=self.left_out | named) if named else None

    def __or__(self, other: "Dialect") -> "Dialect":
        return Dialect(
            is_new_name=self.is_new_name or other.is_new_name,
            left_out=self.left_out | other.left_out,
        )
