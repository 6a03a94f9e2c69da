"""`Refusal`: the reason why the gateway rejects a request, in the form of OpenAI's errors. Pure."""

from collections.abc import Iterable
from typing import Any, cast

from telescope_core.base.errors import nearest

MAX_SHOWN = 2000
"""Most characters of a reason; a request may hold names and values of any length."""
_MAX_NAME = 200


class Refusal(Exception):
    """Raised to reject a request: names the part of the request, the reason, and what to do.

    `param`: that part; `code`: OpenAI's kind of error; `status`: the HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        self.message = message if len(message) <= MAX_SHOWN else f"{message[:MAX_SHOWN]}..."
        super().__init__(self.message)
        self.param = param and param[:_MAX_NAME]
        self.code = code
        self.status = status

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def wrong(param: str, expected: str, got: object) -> Refusal:
    """Build the refusal of a value that the API does not allow in that place."""
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    return Refusal(f"{param} must be {expected}, got {shown}", param=param, code="invalid_value")


def unsupported(param: str, why: str) -> Refusal:
    """Build the refusal of a request that could not be answered exactly."""
    return Refusal(f"{param}: {why}", param=param, code="unsupported_parameter")


def unknown(kind: str, where: str, known: Iterable[str]) -> Refusal:
    """Build the refusal of an unknown name at `where`; names the nearest known ones."""
    where = where[:_MAX_NAME]
    close = nearest(where.rpartition(".")[2], known)
    advice = f"did you mean {' or '.join(close)}?" if close else "leave it out"
    return Refusal(f"unknown {kind} {where!r}; {advice}", param=where, code="unknown_parameter")


def is_empty(value: object) -> bool:
    """Return whether `value` is null, empty, or made only of such values.

    Clients fill in fields of other endpoints in this way, at any depth.
    """
    if isinstance(value, dict):
        return all(is_empty(one) for one in cast(dict[str, object], value).values())
    if isinstance(value, list):
        return all(is_empty(one) for one in cast(list[object], value))
    return value is None or value == ""
