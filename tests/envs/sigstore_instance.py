"""A small Sigstore on this machine, for tests: a CA, a certificate log, a signature log.

It speaks the HTTP that signing speaks and keeps its own keys, so bundles are made and verified by
the sigstore library alone, against a root of trust that only these tests have.
"""

import base64
import hashlib
import json
import struct
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER = "https://token.actions.githubusercontent.com"
_SCT_LIST = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_ISSUER_V1 = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_ISSUER_V2 = ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_START = "2020-01-01T00:00:00Z"


def workflow(repository="acme/envs", name="publish.yml", ref="refs/tags/v1"):
    """Return the identity of a GitHub workflow, as certificates name it."""
    return f"https://github.com/{repository}/.github/workflows/{name}@{ref}"


def token_for_job(identity, issuer=ISSUER):
    """Return the OIDC token that a CI job of `identity` would get."""
    now = int(time.time())
    claims = {"iss": issuer, "sub": identity, "aud": "sigstore", "iat": now, "exp": now + 300}
    return jwt.encode(claims, "k" * 32, algorithm="HS256")


class SigstoreInstance:
    """Answers on loopback until `close`."""

    def __init__(self, folder: Path) -> None:
        self.ca_key, self.ct_key, self.log_key = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        self.ca = self._root_certificate()
        self.entries = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.trusted_root = folder / "trusted_root.json"
        self.trusted_root.write_text(json.dumps(self._trusted_root()))
        self.trust_config = folder / "trust_config.json"
        self.trust_config.write_text(json.dumps(self._trust_config()))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def certificates(self, request: bytes, claims: dict) -> list[str]:
        """Return the chain for a signing request: what a CA does, log entry included."""
        key = x509.load_pem_x509_csr(request).public_key()
        builder = self._leaf(key, claims)
        plain = builder.sign(self.ca_key, hashes.SHA256())
        stamped = builder.add_extension(
            x509.UnrecognizedExtension(_SCT_LIST, self._timestamp_of(plain)), critical=False
        )
        chain = (stamped.sign(self.ca_key, hashes.SHA256()), self.ca)
        return [one.public_bytes(serialization.Encoding.PEM).decode() for one in chain]

    def log(self, proposed: dict) -> dict:
        """Return the log entry of a proposed signature, in a log that holds it alone."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        payload = base64.b64decode(envelope["payload"])
        spec = {
            "envelopeHash": _sha256(content["envelope"].encode()),
            "payloadHash": _sha256(payload),
            "signatures": [
                {"signature": envelope["signatures"][0]["sig"], "verifier": content["verifiers"][0]}
            ],
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}).encode()
        root = hashlib.sha256(b"\0" + body).digest()
        log_id = hashlib.sha256(_public(self.log_key)).digest()
        note = f"test log\n1\n{base64.b64encode(root).decode()}\n"
        signed = base64.b64encode(log_id[:4] + _sign(self.log_key, note.encode())).decode()
        entry = {
            "body": base64.b64encode(body).decode(),
            "integratedTime": int(time.time()),
            "logID": log_id.hex(),
            "logIndex": 0,
        }
        canonical = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        self.entries += 1
        proof = {"logIndex": 0, "treeSize": 1, "rootHash": root.hex(), "hashes": []}
        proof["checkpoint"] = f"{note}\n\u2014 test {signed}\n"
        promise = base64.b64encode(_sign(self.log_key, canonical)).decode()
        return {
            "00": {
                **entry,
                "verification": {"inclusionProof": proof, "signedEntryTimestamp": promise},
            }
        }

    def _root_certificate(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        usage = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        key = self.ca_key.public_key()
        return (
            _dated(x509.CertificateBuilder(), days=365)
            .subject_name(name)
            .issuer_name(name)
            .public_key(key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )

    def _leaf(self, key, claims: dict) -> x509.CertificateBuilder:
        issuer = claims["iss"].encode()
        usage = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "key_cert_sign",
                "crl_sign",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca_key.public_key())
        signing = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
        typed = b"\x0c" + bytes([len(issuer)]) + issuer
        return (
            _dated(x509.CertificateBuilder(), minutes=10)
            .subject_name(x509.Name([]))
            .issuer_name(self.ca.subject)
            .public_key(key)
            .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
            .add_extension(signing, critical=False)
            .add_extension(authority, critical=False)
            .add_extension(names, critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_V1, issuer), critical=False)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_V2, typed), critical=False)
        )

    def _timestamp_of(self, certificate: x509.Certificate) -> bytes:
        """Return the extension with a signed certificate timestamp (RFC 6962, 3.2 and 3.3)."""
        milliseconds = int(time.time() * 1000)
        issuer = hashlib.sha256(_public(self.ca_key)).digest()
        body = certificate.tbs_certificate_bytes
        length = struct.pack("!I", len(body))[1:]
        head = struct.pack("!BBQH", 0, 0, milliseconds, 1)
        signature = _sign(self.ct_key, head + issuer + length + body + b"\0\0")
        log_id = hashlib.sha256(_public(self.ct_key)).digest()
        stamp = struct.pack("!B32sQH", 0, log_id, milliseconds, 0)
        stamp += struct.pack("!BBH", 4, 3, len(signature)) + signature
        stamps = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        return b"\x04" + bytes([0x81, len(stamps)] if len(stamps) > 127 else [len(stamps)]) + stamps

    def _trusted_root(self) -> dict:
        ca = base64.b64encode(self.ca.public_bytes(serialization.Encoding.DER)).decode()
        authority = {
            "subject": {"organization": "test", "commonName": "test CA"},
            "uri": self.url,
            "certChain": {"certificates": [{"rawBytes": ca}]},
            "validFor": {"start": _START},
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log_of(self.log_key)],
            "ctlogs": [self._log_of(self.ct_key)],
            "certificateAuthorities": [authority],
            "timestampAuthorities": [],
        }

    def _log_of(self, key) -> dict:
        public = _public(key)
        return {
            "baseUrl": self.url,
            "hashAlgorithm": "SHA2_256",
            "publicKey": {
                "rawBytes": base64.b64encode(public).decode(),
                "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                "validFor": {"start": _START},
            },
            "logId": {"keyId": base64.b64encode(hashlib.sha256(public).digest()).decode()},
        }

    def _trust_config(self) -> dict:
        service = {
            "url": self.url,
            "majorApiVersion": 1,
            "validFor": {"start": _START},
            "operator": "test",
        }
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service],
            "oidcUrls": [service],
            "rekorTlogUrls": [service],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [],
            "tsaConfig": {"selector": "ANY"},
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": self._trusted_root(),
            "signingConfig": signing,
        }


def _handler(instance: SigstoreInstance) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/v2/signingCert":
                token = self.headers["Authorization"].removeprefix("Bearer ")
                claims = jwt.decode(token, options={"verify_signature": False})
                request = base64.b64decode(asked["certificateSigningRequest"])
                chain = {"certificates": instance.certificates(request, claims)}
                answer = {"signedCertificateEmbeddedSct": {"chain": chain}}
            else:
                assert self.path == "/api/v1/log/entries"
                answer = instance.log(asked)
            data = json.dumps(answer).encode()
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def _dated(builder: x509.CertificateBuilder, **length) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(**length))
    )


def _public(key) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _sign(key, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _sha256(data: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}
