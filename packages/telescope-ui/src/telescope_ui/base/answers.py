"""Answers of pages: objects that become JSON, and errors that become a status."""

from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response

from telescope_core.base.errors import ConfigError
from telescope_core.base.terminal import whole_strings

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON. A number that is not finite becomes null."""


class ParameterError(ConfigError):
    """A parameter of an address has a value that cannot be used."""


class NotThereError(ConfigError):
    """An address names something that does not exist."""


def as_json(value: object) -> bytes:
    r"""Return `value` as JSON; dataclasses become objects, and non-finite numbers null.

    What UTF-8 lacks, such as a byte `\xff` in the name of a folder, is written as `\udcff`.
    """
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(whole_strings(msgspec.to_builtins(value, enc_hook=str)))


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error that a person can act on."""
    if isinstance(error, ParameterError):
        return 400
    return 404 if isinstance(error, NotThereError) else 409


def error_body(status: int, message: str) -> JsonObject:
    """Return the body of the answer for an error."""
    return {"error": {"status": status, "message": message}}


def error_response(status: int, message: str) -> Response:
    """Return that body as a response with its status."""
    body = as_json(error_body(status, message))
    return Response(body, status_code=status, media_type="application/json")
