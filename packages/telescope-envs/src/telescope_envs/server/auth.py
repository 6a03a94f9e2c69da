"""Bearer tokens of the registry server: creates, checks and revokes them; stores only hashes.

A token is 32 random bytes, so one round of SHA-256 is enough hashing. Tokens are accepted only in
the Authorization header, because URLs end up in logs and histories.
"""

import base64
import binascii
import hmac
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.terminal import acts_on_terminals
from telescope_envs.records.files import sha256_of
from telescope_envs.server.database import Database, time_text
from telescope_envs.server.refusals import Limit, Refusal, shared_address

if TYPE_CHECKING:
    # Tokens are made and revoked without the packages that serve.
    from fastapi import Request

PREFIX = "tsh_"
LOOKS_LIKE_A_TOKEN = re.compile(r"tsh_[A-Za-z0-9_-]{20,}")
"""Pattern of a token; secret scanners can use it as well."""


class Scope(StrEnum):
    """Rights of a token; each scope includes those before it."""

    READ = "read"
    """Read a private registry."""
    PUBLISH = "publish"
    """Publish, yank and deprecate under its owners."""
    ADMIN = "admin"
    """All of that for every owner, and publish names that are similar to existing ones."""


_RANK = {scope: rank for rank, scope in enumerate(Scope)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerToken:
    """The record of one token, without its secret."""

    id: str
    """Identifies it in lists and for revoking; independent of the secret."""
    label: str
    scope: Scope
    owners: tuple[str, ...]
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None

    def includes(self, scope: Scope) -> bool:
        """Return whether it permits everything that `scope` does."""
        return _RANK[self.scope] >= _RANK[scope]

    def may_publish_as(self, owner: str) -> bool:
        """Return whether it may publish under `owner`."""
        return self.scope is Scope.ADMIN or (self.includes(Scope.PUBLISH) and owner in self.owners)

    @property
    def why_not(self) -> str:
        """Reason why the token is no longer valid; empty while it is valid."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if datetime.now(UTC) >= self.expires_at else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A new token with its secret, which is stored nowhere."""

    token: CallerToken
    secret: str = field(repr=False)


_COLUMNS = "id, label, scope, owners, created_at, expires_at, revoked_at"


def create_token(
    database: Database, label: str, *, scope: Scope, owners: tuple[str, ...], lives: timedelta
) -> NewToken:
    """Create a token that expires after `lives`; raises ConfigError for invalid arguments."""
    _check_owners(database, scope, owners)
    if lives <= timedelta(0):
        raise ConfigError("a token needs a lifetime above 0 days; give a larger --days")
    if not label.strip() or acts_on_terminals(label):
        raise ConfigError(f"the label must be one line of text, got {label!r}; correct it")
    now = datetime.now(UTC)
    token = CallerToken(
        id=secrets.token_hex(4),
        label=label,
        scope=scope,
        owners=owners,
        created_at=now,
        expires_at=now.replace(microsecond=0) + lives,
    )
    secret = PREFIX + secrets.token_urlsafe(32)
    with database.transaction() as writer:
        writer.execute(
            "INSERT INTO tokens (id, digest, label, scope, owners, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(token.id, sha256_of(secret), label, scope.value, " ".join(owners)),
                *(time_text(token.created_at), token.expires_at.isoformat()),
            ),
        )
    return NewToken(token=token, secret=secret)


def find_token(database: Database, secret: str) -> CallerToken | None:
    """Return the token with that secret, even if expired or revoked; None if it is unknown."""
    digest = sha256_of(secret)
    for found, *columns in database.rows(
        f"SELECT digest, {_COLUMNS} FROM tokens WHERE digest = ?", digest
    ):
        if hmac.compare_digest(found, digest):
            return _token(tuple(columns))
    return None


def all_tokens(database: Database) -> list[CallerToken]:
    """Return all tokens, oldest first."""
    rows = database.rows(f"SELECT {_COLUMNS} FROM tokens ORDER BY created_at, id")
    return [_token(row) for row in rows]


def revoke_token(database: Database, wanted: str) -> CallerToken:
    """Revoke the token with the id `wanted`; new requests with it are refused at once."""
    known = {token.id: token for token in all_tokens(database)}
    if wanted not in known:
        # A secret typed here by mistake must not come back in an error.
        shown = "(a secret)" if LOOKS_LIKE_A_TOKEN.search(wanted) else wanted
        raise unknown_name(
            "token", shown, known, "(give the id that `telescope hub token list` shows)"
        )
    with database.transaction() as writer:
        writer.execute(
            "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at = ''",
            (time_text(datetime.now(UTC)), wanted),
        )
    return next(token for token in all_tokens(database) if token.id == wanted)


def _check_owners(database: Database, scope: Scope, owners: tuple[str, ...]) -> None:
    if (scope is Scope.PUBLISH) != bool(owners):
        raise ConfigError(
            "a token with scope publish needs the namespaces it may publish under, and no other "
            f"scope takes any; got scope {scope.value} with {', '.join(owners) or 'none'}"
        )
    known = [row[0] for row in database.rows("SELECT owner FROM namespaces")]
    for owner in owners:
        if owner not in known:
            raise unknown_name("namespace", owner, known, "(add it: telescope hub namespace add)")


def _token(row: tuple[str, ...]) -> CallerToken:
    token_id, label, scope, owners, created_at, expires_at, revoked_at = row
    return CallerToken(
        id=token_id,
        label=label,
        scope=Scope(scope),
        owners=tuple(owners.split()),
        created_at=datetime.fromisoformat(created_at),
        expires_at=datetime.fromisoformat(expires_at),
        revoked_at=datetime.fromisoformat(revoked_at) if revoked_at else None,
    )


_TOKEN_PARAMETERS = {"token", "access_token", "api_key", "apikey", "auth"}
_FAILED_LOGINS = 20


class Callers:
    """Looks up the tokens of requests in `database`, and limits how often clients may guess."""

    def __init__(self, database: Database, *, is_private: bool) -> None:
        self._database = database
        self.is_private = is_private
        self._failed = Limit("refused tokens", _FAILED_LOGINS, 60.0)

    def reader(self, request: "Request") -> CallerToken | None:
        """Return the token of a read request, if any; raises Refusal when it may not read."""
        secret = _secret(request)
        if secret:
            return self.of(request, Scope.READ)
        if self.is_private:
            raise _unauthorized("this registry is private, and the request has no token")
        return None

    def of(self, request: "Request", scope: Scope) -> CallerToken:
        """Return the token of a request that needs `scope`; raises Refusal when it has none."""
        host = request.client.host if request.client else ""
        secret = _secret(request)
        if not secret:
            raise _unauthorized("the request has no token")
        token = find_token(self._database, secret)
        problem = "unknown" if token is None else token.why_not
        if token is None or problem:
            # Only refusals are limited: whoever shares the address has a right to be served.
            self._failed.take(shared_address(host))
            raise _unauthorized(f"the token is {problem}")
        if token.owners and all(map(self._is_suspended, token.owners)):
            raise _suspended(token.owners[0])
        if not token.includes(scope):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"this token has scope {token.scope.value}, but this request needs scope "
                f"{scope.value}",
                "ask whoever runs this registry for such a token",
            )
        return token

    def again(self, token: CallerToken, owner: str) -> str:
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
        if token.scope is not Scope.ADMIN and self._is_suspended(owner):
            raise _suspended(owner)
        return token.id

    def _is_suspended(self, owner: str) -> bool:
        query = "SELECT status FROM namespaces WHERE owner = ?"
        return self._database.value(query, owner) == "suspended"


def refuse_token_in_address(path: str, query: str) -> None:
    """Raise Refusal if the URL contains text that may be a token."""
    names = {part.partition("=")[0].lower() for part in query.split("&")}
    if names & _TOKEN_PARAMETERS or LOOKS_LIKE_A_TOKEN.search(unquote(f"{path}?{query}")):
        raise Refusal(
            HTTPStatus.BAD_REQUEST,
            "the URL contains a token, and URLs end up in logs",
            "send it in the header 'Authorization: Bearer ...', and revoke this one",
        )


def _secret(request: "Request") -> str:
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


def _suspended(owner: str) -> Refusal:
    return Refusal(
        HTTPStatus.FORBIDDEN,
        f"namespace {owner!r} is suspended: it can publish nothing, and its tokens are refused",
        "ask whoever runs this registry why",
    )


def _unauthorized(error: str) -> Refusal:
    return Refusal(
        HTTPStatus.UNAUTHORIZED,
        error,
        "set TELESCOPE_HUB_TOKEN to a token that whoever runs this registry made with telescope "
        "hub token create",
    )
