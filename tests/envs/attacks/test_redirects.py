"""A registry that sends its clients elsewhere gets no token there, and never out of https."""

import datetime
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.envs.projects import write_registry
from tests.envs.static_host import open_store, static_host

from telescope_core.errors import RegistryError

TOKEN = "planted-token"


@pytest.fixture
def folder(tmp_path):
    write_registry(tmp_path / "registry")
    return tmp_path / "registry"


@pytest.fixture
def hosts(folder):
    with static_host(folder) as own, static_host(folder) as foreign:
        yield own, foreign


def kept(cache) -> list:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_redirect_to_another_port_is_followed_without_the_token(hosts, tmp_path):
    own, foreign = hosts
    there = f"{foreign.address}/config.json"
    own.faults["/config.json"] = lambda handler: handler.answer(302, Location=there)
    store = open_store(own.address, tmp_path / "cache", token=TOKEN)
    assert store.read("config.json")
    assert own.tokens_seen() == {f"Bearer {TOKEN}"}
    assert len(foreign.requests) == 1
    assert foreign.tokens_seen() == set()


def test_a_redirect_back_home_gets_the_token_again(hosts, tmp_path):
    own, foreign = hosts
    there, home = f"{foreign.address}/x", f"{own.address}/aliases.toml"
    own.faults["/config.json"] = lambda handler: handler.answer(307, Location=there)
    foreign.faults["/x"] = lambda handler: handler.answer(302, Location=home)
    assert open_store(own.address, tmp_path / "cache", token=TOKEN).read("config.json")
    assert [path for path, _ in own.requests] == ["/config.json", "/aliases.toml"]
    assert (own.tokens_seen(), foreign.tokens_seen()) == ({f"Bearer {TOKEN}"}, set())


def test_a_wheel_on_another_host_is_fetched_without_the_token(hosts, tmp_path):
    own, foreign = hosts
    store = open_store(own.address, tmp_path / "cache", token=TOKEN)
    assert store.artifact(f"{foreign.address}/config.json", max_bytes=1000)
    assert store.artifact(f"{own.address}/config.json", max_bytes=1000)
    assert (own.tokens_seen(), foreign.tokens_seen()) == ({f"Bearer {TOKEN}"}, set())


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://user:secret@127.0.0.1:1/x", "which is never fetched"),
        ("ftp://127.0.0.1/x", "which is never fetched"),
        ("http://192.0.2.1/x", "plain http, which anyone on the network can change"),
        ("http://[::1/x", "Invalid URL in location"),
        ("", "redirects without a Location header"),
    ],
)
def test_what_cannot_be_followed_is_refused(hosts, tmp_path, location, message):
    own, _ = hosts
    own.faults["/config.json"] = lambda handler: handler.answer(302, Location=location)
    with pytest.raises(RegistryError, match=message) as refused:
        open_store(own.address, tmp_path / "cache", token=TOKEN).read("config.json")
    assert "secret" not in str(refused.value)
    assert kept(tmp_path / "cache") == []


@pytest.fixture
def https_host(folder, tmp_path, monkeypatch):
    """A host with a certificate that this process trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "both.pem").write_bytes(secret + pem)
    (tmp_path / "certificate.pem").write_bytes(pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    with static_host(folder, context) as server:
        yield server


def test_https_never_leads_to_http(https_host, hosts, tmp_path):
    _, plain = hosts
    store = open_store(https_host.address, tmp_path / "cache", token=TOKEN)
    assert store.read("aliases.toml")
    there = f"{plain.address}/config.json"
    https_host.faults["/config.json"] = lambda handler: handler.answer(301, Location=there)
    with pytest.raises(
        RegistryError, match="redirects from https to http, which is never followed"
    ):
        store.read("config.json")
    assert plain.requests == []
    assert len(kept(tmp_path / "cache")) == 1


def test_a_wheel_of_an_https_registry_is_never_fetched_by_http(https_host, hosts, tmp_path):
    _, plain = hosts
    store = open_store(https_host.address, tmp_path / "cache", token=TOKEN)
    with pytest.raises(RegistryError, match="is https, but it gives a wheel the URL http://"):
        store.artifact(f"{plain.address}/config.json", max_bytes=1000)
    assert plain.requests == []


def test_a_certificate_that_nobody_vouches_for_is_refused(https_host, tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(RegistryError, match="CERTIFICATE_VERIFY_FAILED"):
        open_store(https_host.address, tmp_path / "cache", token=TOKEN).read("config.json")
    assert https_host.requests == []
