"""A registry that sends its clients elsewhere gets no token there, and never out of https."""

import datetime
import ipaddress
import ssl
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import open_store, static_host

from telescope_core.errors import RegistryError
from telescope_envs.install.pipeline import checked_wheel
from telescope_envs.registry import Opening, Registry, open_registry
from telescope_envs.registry.fetch import Reach, reach_of
from telescope_envs.rules.admission import index_line

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


NEAR = [
    *("127.0.0.1", "localhost", "LOCALHOST", "127.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]"),
    *("0.0.0.0", "10.0.0.5", "172.16.1.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("[fd00::1]", "[fe80::1]", "[::ffff:10.0.0.5]"),
]


@pytest.mark.parametrize("address", ["https://hub.example", "hf://acme/envs"])
@pytest.mark.parametrize("host", NEAR)
def test_a_registry_elsewhere_does_not_send_anybody_to_their_own_network(
    tmp_path, monkeypatch, address, host
):
    far = {"hub.example": Reach.INTERNET, "huggingface.co": Reach.INTERNET}
    monkeypatch.setattr(
        "telescope_envs.registry.fetch.reach_of", lambda name: far.get(name) or reach_of(name)
    )
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    store = open_store(address, tmp_path / "cache")
    with pytest.raises(RegistryError, match="on this machine or in its network"):
        store.artifact(f"https://{host}:1/x.whl", max_bytes=1000)


def test_nor_by_a_redirect(hosts, tmp_path, monkeypatch):
    own, foreign = hosts
    reaches = {"127.0.0.1": Reach.INTERNET, "localhost": Reach.MACHINE}
    monkeypatch.setattr("telescope_envs.registry.fetch.reach_of", reaches.__getitem__)
    there = f"{foreign.address.replace('127.0.0.1', 'localhost')}/config.json"
    own.faults["/config.json"] = lambda handler: handler.answer(302, Location=there)
    with (
        closing(open_store(own.address, tmp_path / "cache")) as store,
        pytest.raises(RegistryError, match="leads to localhost, which is on this machine"),
    ):
        store.read("config.json")
    assert foreign.requests == []
    assert len(own.requests) == 1, "it is not tried again"


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1", Reach.MACHINE),
        ("10.0.0.5", Reach.NETWORK),
        ("93.184.216.34", Reach.INTERNET),
        ("::1", Reach.MACHINE),
        ("2606:2800:220:1::1", Reach.INTERNET),
        ("x" * 300, Reach.INTERNET),
    ],
)
def test_from_where_a_host_is_reached(host, reach):
    assert reach_of(host) is reach


def test_a_registry_of_a_network_may_name_its_hosts_but_not_this_machine(tmp_path, monkeypatch):
    store = open_store("https://10.0.0.5:1", tmp_path / "cache")
    with pytest.raises(RegistryError, match="leads to 127"):
        store.artifact("https://127.0.0.1:1/x.whl", max_bytes=1000)
    reaches = {"127.0.0.1": Reach.NETWORK, "10.0.0.5": Reach.NETWORK}
    monkeypatch.setattr("telescope_envs.registry.fetch.reach_of", reaches.__getitem__)
    with pytest.raises(RegistryError, match="Connection refused"):
        store.artifact("https://127.0.0.1:1/x.whl", max_bytes=1000)


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


@pytest.fixture
def elsewhere(https_host, tmp_path, home):
    """A registry in a folder whose only wheel is on that host, and the release with it."""

    def make(address: str = https_host.address):
        publication = toy_publication()
        wheel = publication.release.wheel
        url = f"{address}/{wheel.filename}"
        release = publication.release.changed(wheel=wheel.changed(urls=(url,)))
        root = tmp_path / "lists"
        write_registry(root)
        (root / "index/acme").mkdir()
        (root / "index/acme/toy.jsonl").write_bytes(index_line(release))
        (https_host.folder / wheel.filename).write_bytes(publication.wheel)
        return str(root), release

    return make


def fetched(root: str, release, *, offline: bool = False) -> bytes:
    found = open_registry(root, Opening(offline=offline))
    return checked_wheel(found, release, progress=lambda step: None).read_bytes()


def test_a_folder_follows_https_addresses_and_keeps_the_wheels(elsewhere, https_host):
    root, release = elsewhere()
    with pytest.raises(RegistryError, match="was never fetched, and --offline"):
        fetched(root, release, offline=True)
    assert open_registry(root).wheel_bytes(release) == toy_publication().wheel
    num_requests = len(https_host.requests)
    assert fetched(root, release, offline=True) == toy_publication().wheel
    assert len(https_host.requests) == num_requests
    assert Registry.at(Path(root)).store.artifact(release.wheel.urls[0], max_bytes=10**6) is None


def test_a_folder_takes_other_bytes_from_elsewhere_no_more_than_its_own(
    elsewhere, https_host, home
):
    root, release = elsewhere()
    (https_host.folder / release.wheel.filename).write_bytes(b"PK")
    with pytest.raises(RegistryError, match="is not the one that was published"):
        fetched(root, release)
    (https_host.folder / release.wheel.filename).unlink()
    with pytest.raises(RegistryError, match="is at none of its URLs"):
        fetched(root, release)
    assert kept(home / "cache/wheels") == []
    (url,) = release.wheel.urls
    (https_host.folder / release.wheel.filename).write_bytes(toy_publication().wheel)
    with pytest.raises(RegistryError, match="longer than 10 bytes, the limit for this file"):
        open_registry(root).store.artifact(url, max_bytes=10)


def test_a_folder_never_leads_to_http(elsewhere, https_host, hosts):
    _, plain = hosts
    root, release = elsewhere(plain.address)
    with pytest.raises(RegistryError, match="gives a wheel the URL http://"):
        fetched(root, release)
    there = f"{plain.address}/config.json"
    https_host.faults["/x.whl"] = lambda handler: handler.answer(301, Location=there)
    with pytest.raises(RegistryError, match="redirects from https to http"):
        open_registry(root).store.artifact(f"{https_host.address}/x.whl", max_bytes=10**6)
    assert plain.requests == []
