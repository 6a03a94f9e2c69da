"""`Refusal`: the gateway's answer to a request that it refuses, in the form of OpenAI's errors."""

from typing import Any


class Refusal(Exception):
    """Raised to refuse a request: names the part of the request, the reason, and what to do.

    `param`: that part; `code`: OpenAI's kind of error; `status`: the HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
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
    """Build the refusal of a value that the API does not allow there."""
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    return Refusal(f"{param} must be {expected}, got {shown}", param=param, code="invalid_value")


def unsupported(param: str, why: str) -> Refusal:
    """Build the refusal of a request that could not be answered exactly."""
    return Refusal(f"{param}: {why}", param=param, code="unsupported_parameter")
