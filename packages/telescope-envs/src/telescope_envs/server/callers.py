"""Authenticates requests by their token and checks what the token allows.

Tokens are accepted only in the Authorization header, because URLs end up in logs and histories.
"""

import base64
import binascii
from http import HTTPStatus
from urllib.parse import unquote

from fastapi import Request

from telescope_envs.server.database import Database
from telescope_envs.server.limits import Limit
from telescope_envs.server.refusal import Refusal
from telescope_envs.server.tokens import LOOKS_LIKE_A_TOKEN, Scope, Token, find_token

_TOKEN_PARAMETERS = {"token", "access_token", "api_key", "apikey", "auth"}
_FAILED_LOGINS = 20


class Callers:
    """Looks up the tokens of requests in `database`, and limits how often clients may guess."""

    def __init__(self, database: Database, *, is_private: bool) -> None:
        self._database = database
        self.is_private = is_private
        self._failed = Limit("refused tokens", _FAILED_LOGINS, 60.0)

    def reader(self, request: Request) -> Token | None:
        """Return the token of a read request, if any; raises Refusal when it may not read."""
        secret = _secret(request)
        if secret:
            return self.of(request, Scope.READ)
        if self.is_private:
            raise _unauthorized("this registry is private, and the request has no token")
        return None

    def of(self, request: Request, scope: Scope) -> Token:
        """Return the token of a request that needs `scope`; raises Refusal when it has none."""
        host = request.client.host if request.client else ""
        self._failed.require(host)
        secret = _secret(request)
        if not secret:
            raise _unauthorized("the request has no token")
        token = find_token(self._database, secret)
        problem = "unknown" if token is None else token.why_not
        if token is None or problem:
            self._failed.take(host)
            raise _unauthorized(f"the token is {problem}")
        return _with_scope(token, scope)

    def again(self, token: Token, owner: str) -> str:
        """Return the id of `token` if it may still publish as `owner`; raises Refusal if not."""
        found = self._database.value("SELECT revoked_at FROM tokens WHERE id = ?", token.id)
        if found != "" or token.why_not:
            raise _unauthorized("the token has been revoked or has expired")
        if not token.may_publish_as(owner):
            allowed = ", ".join(token.owners) or "none"
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"this token may not publish as {owner!r}; its namespaces: {allowed}",
                "use a token for that namespace, or publish under one of these",
            )
        return token.id


def refuse_token_in_address(path: str, query: str) -> None:
    """Raise Refusal when the URL contains what may be a token."""
    names = {part.partition("=")[0].lower() for part in query.split("&")}
    if names & _TOKEN_PARAMETERS or LOOKS_LIKE_A_TOKEN.search(unquote(f"{path}?{query}")):
        raise Refusal(
            HTTPStatus.BAD_REQUEST,
            "the URL contains a token, and URLs end up in logs",
            "send it in the header 'Authorization: Bearer ...', and revoke this one",
        )


def _secret(request: Request) -> str:
    """Return the secret in the request: a bearer token, or a password as pip and uv send it."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]


def _with_scope(token: Token, scope: Scope) -> Token:
    if not token.includes(scope):
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            f"this token has scope {token.scope.value}, but this request needs scope {scope.value}",
            "ask whoever runs this registry for such a token",
        )
    return token


def _unauthorized(error: str) -> Refusal:
    return Refusal(
        HTTPStatus.UNAUTHORIZED,
        error,
        "set TELESCOPE_HUB_TOKEN to a token that whoever runs this registry made with telescope "
        "hub token create",
    )
