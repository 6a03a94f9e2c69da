"""`Refusal`: an answer of the gateway that is no completion, in the form of OpenAI's errors."""

from typing import Any


class Refusal(Exception):
    """What is answered instead of a completion: which part of the request, why, and what to do."""

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
    """Build the refusal of a value that is not what the API has there."""
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    return Refusal(f"{param} must be {expected}, got {shown}", param=param, code="invalid_value")


def unsupported(param: str, why: str) -> Refusal:
    """Build the refusal of something that cannot be made exact here."""
    return Refusal(f"{param}: {why}", param=param, code="unsupported_parameter")
