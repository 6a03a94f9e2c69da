"""What a stranger, a publisher or a clumsy friend may try at a registry server."""

import asyncio
import base64
import io
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
from tests.envs.projects import TOY, toy_publication
from tests.envs.server.sending import Sender, publication_now, sha256, stored_files
from tests.envs.serving import served

from telescope_envs.records.reading import Publication
from telescope_envs.server.app import ServerOptions, create_app
from telescope_envs.server.auth import (
    Scope,
    revoke_token,
)
from telescope_envs.server.hub import HubStore


@pytest.fixture
def hub(tmp_path):
    with served(tmp_path / "hub", ServerOptions(max_wheel_bytes=64 * 1024)) as hub:
        hub.store.publish(toy_publication())
        hub.store.add_namespace("umbrella", [])
        yield hub


@pytest.fixture
def unchanged(hub):
    """Whatever was tried, the registry is what it was."""
    state, files = hub.store.changes, stored_files(hub.store.data)
    yield
    assert hub.store.changes == state
    assert stored_files(hub.store.data) == files


def refused(answer: httpx.Response, status: int, message: str) -> None:
    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert set(answer.json()) == {"error", "what_to_do"}


@pytest.mark.usefixtures("unchanged")
def test_a_namespace_of_somebody_else(hub):
    with Sender(hub.address, hub.token(owners=("umbrella",))) as sender:
        refused(sender.publish(publication_now()), 403, "may not publish as 'acme'")
        etag = sender.get("status/acme/toy.json").headers["etag"]
        answer = sender.put("api/status/acme/toy", content=b"{}", headers={"If-Match": etag})
        refused(answer, 403, "may not publish as 'acme'")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("secret", ["", "tsh_" + "x" * 43, "nonsense"])
def test_no_token_and_tokens_that_nobody_made(hub, secret):
    with Sender(hub.address, secret) as sender:
        answer = sender.publish(publication_now())
        refused(answer, 401, "the token is unknown" if secret else "has no token")
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_token_that_has_expired(hub):
    secret = hub.token(days=1e-9)
    state = hub.store.changes
    with Sender(hub.address, secret) as sender:
        refused(sender.publish(publication_now()), 401, "the token is expired")
    assert hub.store.changes == state


def test_a_token_that_was_revoked(hub):
    with Sender(hub.address, hub.token()) as sender:
        token_id = sender.get("api/token").json()["id"]
        assert sender.publish(publication_now()).status_code == 201
        revoke_token(hub.store.database, token_id)
        refused(sender.publish(publication_now("0.3.0")), 401, "the token is revoked")


@pytest.mark.usefixtures("unchanged")
def test_a_token_that_may_only_read(hub):
    with Sender(hub.address, hub.token(Scope.READ)) as sender:
        refused(sender.publish(publication_now()), 403, "this token has scope read")


def test_guessing_tokens_is_slowed_down(hub):
    with Sender(hub.address, "tsh_" + "x" * 43) as sender:
        answers = [sender.get("api/token").status_code for _ in range(30)]
    assert answers.count(429) >= 5
    assert answers[0] == 401
    # Others share the address, for instance behind a proxy that was not named.
    with Sender(hub.address, hub.token()) as sender:
        assert sender.get("api/token").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "a@localhost",
        "[::1",
        "localhos",
    ],
)
def test_a_foreign_host_is_refused_and_shown_to_nobody(hub, host):
    with httpx.Client(base_url=f"{hub.address}/", headers={"Host": host}) as client:
        for path in ("", "environments/acme/toy", "config.json", "index/acme/toy.jsonl"):
            answer = client.get(path, headers={"Accept": "text/html"})
            refused(answer, 421, "--public-address")
            assert f"--registry http://{host}" not in answer.text


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "127.0.0.1:1", "[::1]:8470", "10.1.2.3"]
)
def test_pages_show_where_the_server_listens_whatever_host_was_asked_for(hub, host):
    with httpx.Client(base_url=f"{hub.address}/", headers={"Host": host}) as client:
        page = client.get("environments/acme/toy")
        assert page.status_code == 200
        assert f"telescope env install acme/toy --registry {hub.address}" in page.text


def test_pages_show_the_public_address(tmp_path):
    options = ServerOptions(public_address="https://hub.example.org/envs")
    with served(tmp_path / "public", options) as hub:
        hub.store.publish(toy_publication())
        for host in ("hub.example.org", "Hub.Example.ORG:443", "127.0.0.1"):
            page = httpx.get(f"{hub.address}/environments/acme/toy", headers={"Host": host})
            assert "--registry https://hub.example.org/envs" in page.text
        assert httpx.get(hub.address, headers={"Host": "hub.example"}).status_code == 421


WITH_TOKENS = [
    "config.json?token=abc",
    "config.json?access_token=abc",
    "api/search?q=tsh_0123456789012345678901234567890123456789012",
    "tsh_0123456789012345678901234567890123456789012/config.json",
    "config.json?x=tsh%5F0123456789012345678901234567890123456789012",
]


@pytest.mark.usefixtures("unchanged")
def test_a_token_in_an_address(hub):
    with Sender(hub.address) as sender:
        for path in WITH_TOKENS:
            refused(sender.get(path), 400, "URLs end up in logs")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("announced", [True, False])
def test_a_wheel_that_is_too_long(hub, announced):
    body = b"x" * (4 * 1024 * 1024)
    multipart = httpx.Request("POST", "http://x", files={"wheel": ("w.whl", body)})
    content = multipart.read()
    pieces = (
        content if announced else (content[i : i + 65536] for i in range(0, len(content), 65536))
    )
    with Sender(hub.address, hub.token()) as sender:
        headers = {"content-type": multipart.headers["content-type"]}
        answer = sender.post("api/releases", content=pieces, headers=headers)
    refused(answer, 413, "longer than 65536 bytes")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("record", ("r", b"{}"))], "got record"),
        ([("record", ("r", b"{}")), ("wheel", ("w", b"")), ("wheel", ("w", b""))], "once"),
        ([("wheel", ("w", b"")), ("other", ("w", b""))], "got wheel, other"),
        ([("record", ("r", b"x" * 300_000)), ("wheel", ("w", b""))], "longer than 262144"),
    ],
)
def test_requests_that_are_no_publication(hub, files, message):
    with Sender(hub.address, hub.token()) as sender:
        refused(sender.post("api/releases", files=files), 400, message)
        refused(sender.post("api/releases", content=b"zip"), 400, "not multipart")


@pytest.mark.usefixtures("unchanged")
def test_a_record_that_is_nested_too_deeply(hub):
    record = "[" * 100_000
    with Sender(hub.address, hub.token()) as sender:
        refused(sender.publish(publication_now(), record=record), 422, "cannot be read")


def with_wheel(data: bytes) -> Publication:
    """Return the toy's release with other bytes, honestly hashed."""
    release = publication_now().release
    wheel = release.wheel.changed(sha256=sha256(data), size=len(data))
    return Publication(release=release.changed(wheel=wheel), wheel=data)


def bomb(*, num_names: int) -> bytes:
    """Return a zip whose many names are all of one compressed run of 8 MiB of zeros."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("telescope_env_acme_toy/000", b"\0" * (8 * 1024 * 1024))
    data = packed.getvalue()
    directory, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    entry = data[directory:end]
    entries = b"".join(entry.replace(b"/000", b"/%03d" % n) for n in range(num_names))
    counts = struct.pack("<HHII", num_names, num_names, len(entries), directory)
    return data[:directory] + entries + data[end : end + 8] + counts + b"\0\0"


@pytest.mark.usefixtures("unchanged")
def test_a_zip_bomb(hub):
    data = bomb(num_names=30)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sum(info.file_size for info in archive.infolist()) > 1000 * len(data)
    with Sender(hub.address, hub.token()) as sender:
        refused(sender.publish(with_wheel(data)), 422, "more than 5000 files or 209715200 bytes")


@pytest.mark.usefixtures("unchanged")
def test_wheels_that_would_write_elsewhere(hub, rewrite):
    paths = ["../evil.py", "/etc/evil", "evil.pth", "telescope_env_acme_toy/../../evil.py"]
    with Sender(hub.address, hub.token()) as sender:
        for path in paths:
            data = rewrite(publication_now().wheel, {path: b"import os"})
            refused(sender.publish(with_wheel(data)), 422, "wheel telescope_env_acme_toy")


@pytest.mark.usefixtures("unchanged")
def test_wheels_that_no_installer_would_take(hub, rewrite):
    info = "telescope_env_acme_toy-0.2.0.dist-info"
    good = publication_now().wheel
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        texts = {name: archive.read(f"{info}/{name}") for name in ("METADATA", "WHEEL")}
    with Sender(hub.address, hub.token()) as sender:
        for name, old, new in (
            ("METADATA", b"Python: >=3.11", b"Python: banana"),
            ("METADATA", b"Metadata-Version: 2.4", b"Metadata-Version: 9.9"),
            ("METADATA", b"Metadata-Version: 2.4\n", b""),
            ("WHEEL", b"Wheel-Version: 1.0", b"Wheel-Version: 9.0"),
        ):
            changed = texts[name].replace(old, new)
            assert changed != texts[name]
            data = rewrite(good, {f"{info}/{name}": changed})
            refused(sender.publish(with_wheel(data)), 422, f"its {name} ")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", ["INSTALLER", "REQUESTED", "direct_url.json", "installer"])
def test_files_that_only_installers_write(hub, rewrite, name):
    path = f"telescope_env_acme_toy-0.2.0.dist-info/{name}"
    with Sender(hub.address, hub.token()) as sender:
        data = rewrite(publication_now().wheel, {path: b"uv"})
        refused(sender.publish(with_wheel(data)), 422, path)


@pytest.mark.usefixtures("unchanged")
def test_wheels_that_were_cut_off(hub):
    good = publication_now().wheel
    with Sender(hub.address, hub.token()) as sender:
        for end in range(0, len(good), len(good) // 8):
            refused(sender.publish(with_wheel(good[:end])), 422, "not a readable zip file")


def test_damaged_wheels_are_an_answer_and_never_a_crash(hub):
    good = publication_now().wheel
    with Sender(hub.address, hub.token()) as sender:
        for place in range(5, len(good), len(good) // 24):
            flipped = good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :]
            answer = sender.publish(with_wheel(flipped))
            # A few bytes of a zip file mean nothing, so that another is as good.
            assert answer.status_code in (201, 409, 422), (place, answer.text)


@pytest.mark.usefixtures("unchanged")
def test_a_record_unlike_its_wheel(hub):
    honest = publication_now()
    other = publication_now(code=f"{TOY}# other\n")
    swapped = Publication(release=honest.release, wheel=other.wheel)
    with Sender(hub.address, hub.token()) as sender:
        renamed = publication_now(factory="telescope_env_acme_toy:Other")
        for odd, message in ((swapped, "of another wheel"), (renamed, "the wheel's factory")):
            answer = sender.publish(odd)
            refused(answer, 422, message)
            assert "install" not in answer.text
            assert answer.json()["what_to_do"] == "build it again with telescope env build and push"
        far = honest.release.wheel.changed(urls=("http://evil.example/x.whl",))
        refused(sender.publish(publication_now(wheel=far)), 422, "wheel.urls must be")


@pytest.mark.slow
def test_two_publishers_racing_for_one_version(hub):
    secret = hub.token()
    rivals = [publication_now(code=f"{TOY}# {number}\n") for number in range(6)]

    def publish(publication) -> int:
        with Sender(hub.address, secret) as sender:
            return sender.publish(publication).status_code

    with ThreadPoolExecutor(len(rivals)) as pool:
        answers = list(pool.map(publish, rivals))
    assert sorted(answers) == [201] + [409] * 5
    winner = rivals[answers.index(201)].release
    assert hub.store.releases.all_of("acme/toy")[-1] == winner
    named = {row[0] for row in hub.store.database.rows("SELECT sha256 FROM artifacts")}
    kept = {path.rpartition("/")[2] for path in stored_files(hub.store.data)}
    assert kept == named, "the losers left nothing"
    assert named & {rival.release.wheel.sha256 for rival in rivals} == {winner.wheel.sha256}


OUTSIDE = [
    "artifacts/../hub.sqlite3",
    "artifacts/%2e%2e/hub.sqlite3",
    "artifacts/..%2fhub.sqlite3",
    "artifacts/..%5chub.sqlite3",
    "..%2f..%2fetc%2fpasswd",
    "%2fetc%2fpasswd",
    "index/acme/..%2f..%2fhub.sqlite3.jsonl",
    "artifacts//etc/passwd",
    "lock",
    "hub.sqlite3",
    "reserved.txt%00.jsonl",
]


@pytest.mark.usefixtures("unchanged")
def test_paths_that_lead_out(hub):
    host, _, port = hub.address.removeprefix("http://").partition("/")[0].partition(":")
    mount = hub.address.rpartition("/")[2]
    with httpx.Client() as client:
        for path in OUTSIDE:
            raw = f"/{mount}/{path}".encode()
            url = httpx.URL(scheme="http", host=host, port=int(port), raw_path=raw)
            assert client.get(url).status_code == 404, path


def test_more_requests_than_allowed(tmp_path):
    with served(tmp_path / "slow", ServerOptions(reads_per_minute=5)) as hub:
        with Sender(hub.address) as sender:
            answers = [sender.get("config.json") for _ in range(7)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        assert answers[-1].headers["retry-after"] == "60"


def test_more_publications_than_allowed(tmp_path):
    options = ServerOptions(publishes_per_hour=1)
    with served(tmp_path / "slow", options) as hub, Sender(hub.address, hub.token()) as sender:
        assert sender.publish(publication_now()).status_code == 201
        refused(sender.publish(publication_now("0.3.0")), 429, "publications of one token")


def test_a_private_registry_shows_nothing_to_strangers(tmp_path):
    with served(tmp_path / "private", ServerOptions(is_private=True)) as hub:
        hub.store.publish(toy_publication())
        (wheel,) = toy_publication().release.wheel.urls
        paths = ["config.json", "index/acme/toy.jsonl", "v1/index.json", wheel, "none"]
        with Sender(hub.address) as stranger:
            for path in paths:
                refused(stranger.get(path), 401, "this registry is private")
        with Sender(hub.address, hub.token(Scope.READ)) as reader:
            assert [reader.get(path).status_code for path in paths] == [200] * 4 + [404]
            assert reader.get(wheel).headers["cache-control"].startswith("private")
        pair = base64.b64encode(f"__token__:{hub.token(Scope.READ)}".encode()).decode()
        answer = httpx.get(f"{hub.address}/{wheel}", headers={"Authorization": f"Basic {pair}"})
        assert answer.status_code == 200, "as pip and uv send a password"


@pytest.mark.parametrize(
    ("hosts", "num_served"),
    [
        ([f"2001:db8::{number:x}" for number in range(1, 8)], 5),
        ([f"2001:db8:0:{number:x}::1" for number in range(1, 8)], 7),
        ([f"192.0.2.{number}" for number in range(1, 8)], 7),
        (["::ffff:192.0.2.1", "192.0.2.1"] * 4, 5),
    ],
    ids=["one network", "several networks", "several addresses", "two spellings"],
)
def test_all_addresses_of_one_customer_share_a_limit(tmp_path, hosts, num_served):
    """A customer of a provider has 2**64 addresses of IPv6."""

    async def statuses(app) -> list[int]:
        found = []
        for host in hosts:
            transport = httpx.ASGITransport(app, client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://[::1]") as client:
                found.append((await client.get("/config.json")).status_code)
        return found

    with closing(HubStore(tmp_path / "slow")) as store:
        app = create_app(store, ServerOptions(reads_per_minute=5))
        found = asyncio.run(statuses(app))
    assert found == [200] * num_served + [429] * (len(hosts) - num_served)
