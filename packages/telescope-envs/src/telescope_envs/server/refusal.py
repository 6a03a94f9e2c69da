"""`Refusal`: why the server refuses a request, and what the caller can do about it."""

from http import HTTPStatus

from telescope_core.errors import RegistryError


class Refusal(RegistryError):
    """A refused request, with the HTTP status of the response."""

    def __init__(self, status: HTTPStatus, error: str, what_to_do: str) -> None:
        super().__init__(f"{error}; {what_to_do}")
        self.status = status
        self.error = error
        self.what_to_do = what_to_do


def refusal_of(error: RegistryError) -> Refusal:
    """Return `error` as a Refusal with status 422, splitting off the advice after the last `; `."""
    if isinstance(error, Refusal):
        return error
    what, _, advice = str(error).rpartition("; ")
    if not what:
        what, advice = str(error), "correct it and publish again"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, what, advice)
