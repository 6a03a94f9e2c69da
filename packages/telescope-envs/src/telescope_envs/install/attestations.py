"""Sigstore attestations of wheels: accepted signers, and checking signatures offline.

An attestation is a Sigstore bundle over an in-toto statement that names the wheel and its sha256.
It proves that a workflow of the namespace's publisher signed these bytes while its short-lived
certificate was valid, and that the signature is in a public log. It proves nothing about what the
code in the wheel does.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.files import sha256_of
from telescope_envs.records.model import read_json
from telescope_envs.records.reading import attestation_path
from telescope_envs.records.release import Publisher, Release
from telescope_envs.registry.config import (
    AttestationMode,
    parse_address,
    read_user_config,
    user_file,
)
from telescope_envs.registry.registry import Registry

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.models import TrustedRoot

PREDICATE_TYPE = "urn:telescope:attestation:publish:v1"
"""Predicate type of PEP 740, which states only that the publisher published this file."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_NOTHING = "Nothing was installed"
INSTALL_HINT = "install it: pip install 'telescope-envs[sigstore]'"
_ISSUERS = {
    "github.com": "https://token.actions.githubusercontent.com",
    "gitlab.com": "https://gitlab.com",
}
MAX_ATTESTATION_BYTES = 1024 * 1024
_REFS = ("refs/heads/", "refs/tags/")
"""Only branches and tags may sign; a pull request may not, whatever workflow it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationPolicy:
    """The attestations that releases of a registry must have."""

    mode: AttestationMode = AttestationMode.OFF
    publishers: tuple[Publisher, ...] = ()
    """The publishers of the release's namespace."""
    trusted_root: Path | None = None
    """Path to another Sigstore's trusted_root.json; None for the public one, from the library."""


def asks_for_attestation(address: str | None, release: Release) -> bool:
    """Return whether the user's configuration requires an attestation of `release`.

    `address` is the address of the namespace's registry; None if only a bundle names the registry.
    """
    config = read_user_config()
    mode = config.strictest
    if address is not None:
        mode, _ = config.attestations_of(parse_address(address))
    is_shown = mode is AttestationMode.WHEN_PRESENT and bool(release.attestation_sha256)
    return is_shown or mode is AttestationMode.REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Attested:
    """A valid attestation, or none if none is required."""

    by: str = ""
    """The identity that signed it; empty if no attestation is required."""
    data: bytes = b""
    """The Sigstore bundle; empty if there is none, or if none is required."""


def require_attestation(registry: Registry, release: Release, wheel: bytes) -> Attested:
    """Check the attestation of `wheel` if the user's configuration requires it for `registry`.

    The registry is asked each time what is signed and who may sign. Raises RegistryError if the
    attestation cannot be read or is not valid.
    """
    mode, root = read_user_config().attestations_of(parse_address(registry.address))
    if mode is AttestationMode.OFF:
        return Attested()
    namespace = registry.namespace(release.owner)
    policy = AttestationPolicy(
        mode=mode,
        publishers=namespace.publishers if namespace is not None else (),
        trusted_root=root,
    )
    bundle = attestation_of(registry, release)
    return Attested(by=check_attestation(release, wheel, bundle, policy), data=bundle or b"")


def require_kept_attestation(release: Release, wheel: bytes, kept: bytes | None) -> Attested:
    """Check the attestation `kept` with a wheel, without its registry.

    The user's configuration says who may sign, and how strict to be. Files that came with the wheel
    may not, because whoever made the wheel would name themselves.
    """
    config = read_user_config()
    trusted = config.signers.get(release.owner)
    if trusted is None:
        raise RegistryError(
            f"{release.id} {release.version} must be attested, and without its registry nothing "
            f'says who may sign it. Add a line {release.owner} = "OWNER/REPOSITORY" below '
            f"[signers] in {user_file()}, or install it from the registry. {_NOTHING}"
        )
    if release.attestation_sha256 and kept is None:
        raise RegistryError(
            f"the attestation of {release.id} {release.version} did not come with its wheel; make "
            f"the bundle again, or install it from the registry. {_NOTHING}"
        )
    publisher = Publisher(
        kind="repository",
        id=trusted.repository,
        workflow=trusted.workflow,
        issuer=trusted.issuer,
    )
    root = config.root(trusted.trusted_root)
    policy = AttestationPolicy(mode=config.strictest, publishers=(publisher,), trusted_root=root)
    return Attested(by=check_attestation(release, wheel, kept, policy), data=kept or b"")


def attestation_of(registry: Registry, release: Release) -> bytes | None:
    """Return the bundle that the registry stores beside the wheel, unchecked; None if none."""
    for url in release.wheel.urls if release.attestation_sha256 else ():
        found = registry.store.artifact(
            attestation_path(url),
            max_bytes=MAX_ATTESTATION_BYTES,
            sha256=release.attestation_sha256,
        )
        if found is not None:
            return found
    return None


def check_attestation(
    release: Release, wheel: bytes, bundle: bytes | None, policy: AttestationPolicy
) -> str:
    """Return the identity that attests `wheel`; raises RegistryError if the attestation fails.

    The identity is empty if `policy` asks for no attestation. `bundle` is the Sigstore bundle that
    the registry stores beside the wheel; None if there is none.
    """
    what = f"the attestation of {release.id} {release.version}"
    if policy.mode is AttestationMode.OFF:
        return ""
    if not release.attestation_sha256:
        if policy.mode is AttestationMode.WHEN_PRESENT:
            return ""
        raise RegistryError(
            f"{release.id} {release.version} has no attestation, and your settings for it are "
            'attestations = "required"; ask its publisher for a release from CI'
        )
    if bundle is None:
        raise RegistryError(
            f"{what} is gone from the registry; tell the registry's owner. {_NOTHING}"
        )
    if sha256_of(bundle) != release.attestation_sha256:
        raise RegistryError(f"{what} is not the one that was published. {_NOTHING}")
    return _verified(release, wheel, bundle, policy, what)


def expected_identities(publishers: Sequence[Publisher]) -> list["RepositoryIdentity"]:
    """Return the accepted signers: the publishers' repositories whose OIDC issuer is known."""
    found: list[RepositoryIdentity] = []
    for publisher in publishers:
        address = publisher.id if "://" in publisher.id else f"https://github.com/{publisher.id}"
        issuer = publisher.issuer or _ISSUERS.get(_host_of(address), "")
        if publisher.kind == "repository" and issuer and " " not in publisher.id:
            found.append(
                RepositoryIdentity(
                    repository=address.rstrip("/"), workflow=publisher.workflow, issuer=issuer
                )
            )
    return found


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # not an address, so nobody can sign for it
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryIdentity:
    """A repository that may sign, limited to one of its workflows if one is given."""

    repository: str
    """Its https address."""
    workflow: str
    """File name such as publish.yml; empty if any workflow of the repository may sign."""
    issuer: str

    def __str__(self) -> str:
        return f"{self.repository}{f' ({self.workflow})' if self.workflow else ''}"

    def allows(self, identity: str) -> bool:
        """Return whether `identity`, `<repository>/<path of workflow>@<ref>`, matches this one."""
        signer, _, ref = identity.partition("@")
        if not signer.startswith(f"{self.repository}/") or not ref.startswith(_REFS):
            return False
        path = signer.removeprefix(f"{self.repository}/").lstrip("/")
        return not self.workflow or path in (self.workflow, f".github/workflows/{self.workflow}")


class _SignedBy:
    """A sigstore policy that accepts any of the allowed identities from its issuer."""

    def __init__(self, allowed: Sequence[RepositoryIdentity]) -> None:
        self._allowed = allowed
        self.identity = ""

    def verify(self, cert: "Certificate") -> None:
        from cryptography.x509 import SubjectAlternativeName, UniformResourceIdentifier
        from sigstore.errors import VerificationError
        from sigstore.verify.policy import OIDCIssuerV2

        names = cert.extensions.get_extension_for_class(SubjectAlternativeName).value
        signers = names.get_values_for_type(UniformResourceIdentifier)
        for identity in self._allowed:
            for signer in signers:
                if identity.allows(signer):
                    OIDCIssuerV2(identity.issuer).verify(cert)
                    self.identity = signer
                    return
        raise VerificationError(
            f"it was signed by {', '.join(signers) or 'no workflow'}, but the namespace "
            f"is published by {', '.join(str(one) for one in self._allowed) or 'no CI workflow'}"
        )


def _verified(
    release: Release, wheel: bytes, bundle: bytes, policy: AttestationPolicy, what: str
) -> str:
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle
        from sigstore.verify import Verifier
    except ImportError as error:
        raise ConfigError(f"{what} cannot be checked without sigstore; {INSTALL_HINT}") from error
    signed_by = _SignedBy(expected_identities(policy.publishers))
    try:
        verifier = Verifier(trusted_root=trusted_root(policy.trusted_root))
        kind, payload = verifier.verify_dsse(Bundle.from_json(bundle), signed_by)
    except (Error, ValueError) as error:
        raise RegistryError(f"{what} is not valid: {plain(error)}. {_NOTHING}") from error
    try:
        said = read_json(payload) if kind == PAYLOAD_TYPE else None
    except ValueError as error:
        said = f"text that is not JSON: {error}"
    sha256 = sha256_of(wheel)
    if said != statement_of(release.wheel.filename, sha256):
        subject: object = said.get("subject") if isinstance(said, dict) else said  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise RegistryError(
            f"{what} is about something else: expected {release.wheel.filename} with sha256 "
            f"{sha256}, got {subject}. {_NOTHING}"
        )
    return signed_by.identity


def trusted_root(path: Path | None) -> "TrustedRoot":
    """Return the root of trust in `path`; for None the public Sigstore's, without a network."""
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig, TrustedRoot

    logging.getLogger("sigstore").setLevel(logging.ERROR)  # being offline is intended
    if path is None:
        return ClientTrustConfig.production(offline=True).trusted_root
    try:
        return TrustedRoot.from_file(str(path))
    except (OSError, Error, ValueError) as error:
        raise ConfigError(
            f"trusted_root {path}: {plain(error)}; give a trusted_root.json"
        ) from error


def plain(error: Exception) -> str:
    """Return the text of an error on one line; of a record with faults, the first one."""
    # pydantic ends each fault with its type, its input and the address of a page.
    lines = str(error).partition(" [type=")[0].split("\n")
    return ": ".join(line.strip() for line in lines)


def statement_of(filename: str, sha256: str) -> dict[str, Any]:
    """Return the in-toto statement about one wheel."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": filename, "digest": {"sha256": sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": None,
    }
