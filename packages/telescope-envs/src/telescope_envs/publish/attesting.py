"""Sign a release with Sigstore if the publisher has an OIDC identity.

In GitHub Actions and similar CI systems, a job proves its identity with a short-lived token, so no
key is stored. The bundle is stored beside the wheel, and its digest is part of the release.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.install.attestations import INSTALL_HINT, plain, statement_of
from telescope_envs.records.files import read_file, sha256_of
from telescope_envs.records.release import Release

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig


class AttestMode(StrEnum):
    """Whether a push signs the release."""

    AUTO = "auto"
    """Sign if there is an OIDC identity and the sigstore library is installed."""
    ALWAYS = "always"
    """Sign, or publish nothing."""
    NEVER = "never"
    """Do not sign, and do not look for an identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """A Sigstore bundle; empty if nothing was signed."""

    data: bytes = b""

    def recorded_in(self, release: Release) -> Release:
        """Return `release` with the digest of the bundle."""
        digest = sha256_of(self.data) if self.data else ""
        return release.changed(attestation_sha256=digest)


def require_trust_config(path: Path) -> None:
    """Raise ConfigError unless the file is JSON, also where nothing will be signed."""
    try:
        json.loads(read_file(path, follows_link=True))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--trust-config {path}: {error}; give the client trust configuration of a Sigstore "
            "instance, a JSON file"
        ) from None


def require_signing(mode: AttestMode) -> None:
    """Raise ConfigError if `always` cannot sign here, before anything is built or changed."""
    if mode is AttestMode.ALWAYS:
        _token_or_reason(mode)


def attest_wheel(
    release: Release,
    mode: AttestMode,
    *,
    trust_config: Path | None = None,
    progress: Callable[[str], None],
) -> Attestation:
    """Sign the wheel of `release` with this job's identity; raises if `always` cannot sign.

    `trust_config` is the client trust configuration of a Sigstore instance other than the public
    one.
    """
    if mode is AttestMode.NEVER:
        return Attestation()
    token, reason = _token_or_reason(mode)
    if not token:
        progress(f"attestation  none: {reason}")
        return Attestation()
    identity, data = _signed(release, token, trust_config)
    progress(f"attestation  signed as {identity}")
    return Attestation(data=data)


def _token_or_reason(mode: AttestMode) -> tuple[str, str]:
    """Return the token of this job, or why there is none; raises for `always` without one."""
    reason = _reason_against(mode)
    token = "" if reason else _ambient_token()
    if not token:
        reason = reason or "this is not a CI job with an OIDC identity"
        if mode is AttestMode.ALWAYS:
            raise ConfigError(
                f"--attest always cannot sign: {reason}; in GitHub Actions the job needs the "
                "permission id-token: write. Nothing was published"
            )
    return token, reason


def _reason_against(mode: AttestMode) -> str:
    try:
        import sigstore.sign  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        if mode is AttestMode.ALWAYS:
            raise ConfigError(f"--attest always needs sigstore; {INSTALL_HINT}") from error
        return f"sigstore is not installed; {INSTALL_HINT}"
    return ""


def _ambient_token() -> str:
    from sigstore.oidc import IdentityError, detect_credential

    try:
        return detect_credential() or ""
    except IdentityError as error:
        raise ConfigError(
            f"this CI job could not get its OIDC token: {error}; in GitHub Actions, give it the "
            "permission id-token: write, or push with --attest never"
        ) from None


def _signed(release: Release, token: str, trust_config: Path | None) -> tuple[str, bytes]:
    import requests
    from sigstore.dsse import Statement
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import SigningContext

    statement = json.dumps(statement_of(release.wheel.filename, release.wheel.sha256))
    try:
        trust = _read_trust(trust_config) if trust_config else ClientTrustConfig.production()
        identity = IdentityToken(token)
        with SigningContext.from_trust_config(trust).signer(identity) as signer:
            bundle = signer.sign_dsse(Statement(statement.encode()))
    except (Error, requests.RequestException, ValueError) as error:
        raise RegistryError(
            f"Sigstore did not sign {release.wheel.filename}: {plain(error)}; nothing was "
            "published. Try again, or push with --attest never"
        ) from None
    return identity.identity, bundle.to_json().encode()


def _read_trust(path: Path) -> "ClientTrustConfig":
    from sigstore.models import ClientTrustConfig

    try:
        return ClientTrustConfig.from_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trust-config {path}: {plain(error)}") from error
