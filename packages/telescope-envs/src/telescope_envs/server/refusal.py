"""`Refusal`: why the server does not do what it was asked, and what to do about it."""

from http import HTTPStatus

from telescope_core.errors import RegistryError


class Refusal(RegistryError):
    """An answer other than yes, with the HTTP status that says so."""

    def __init__(self, status: HTTPStatus, error: str, what_to_do: str) -> None:
        super().__init__(f"{error}; {what_to_do}")
        self.status = status
        self.error = error
        self.what_to_do = what_to_do


def refusal_of(error: RegistryError) -> Refusal:
    """Return `error` as a refusal: what was sent cannot be accepted as it is."""
    if isinstance(error, Refusal):
        return error
    what, _, advice = str(error).rpartition("; ")
    if not what:
        what, advice = str(error), "correct it and publish again"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, what, advice)
