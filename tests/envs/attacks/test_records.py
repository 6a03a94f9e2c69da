"""Records that a publisher, an old server or an editor may have left in a registry."""

import json
import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from tests.envs.projects import TOY, toy_publication, write_registry
from tests.envs.server.sending import Sender, publication_now
from tests.envs.serving import served

from telescope_core.errors import RegistryError, TelescopeError
from telescope_envs.publish.first_party import publish
from telescope_envs.publish.status import yank
from telescope_envs.records.catalog import catalog_row
from telescope_envs.records.reading import index_lines, parse_status, read_releases
from telescope_envs.records.release import (
    ProtocolRange,
    RewardRange,
)
from telescope_envs.registry import Registry, resolve
from telescope_envs.rules.admission import index_line, published_versions
from telescope_envs.rules.check import check_registry
from telescope_envs.rules.tree import read_tree

NUM_RANDOM = 4000
REWARD = {"minimum": 0.0, "maximum": 1.0, "success": 1.0}
HOSTILE_RECORDS = {
    "a reward of NaN": {"reward": RewardRange(**REWARD | {"success": math.nan})},
    "an infinite reward": {"reward": RewardRange(**REWARD | {"maximum": math.inf})},
    "a weight of NaN": {"reward_weights": {"correct": math.nan}},
    "a minimum above": {"reward": RewardRange(**REWARD | {"minimum": 2.0})},
    "protocols out of order": {"protocol": ProtocolRange(minimum="2.0")},
    "a negative split": {"splits": {"train": -1}},
    "an escape in a split": {"splits": {"\x1b[2Jtrain": 1}},
    "an escape in a secret": {"secrets": ("\x1b]0;x",)},
    "an escape in a requirement": {"requires_dist": ("telescope-core\x1b[2J",)},
    "a range of Python that is none": {"requires_python": "banana"},
    "an exact Python that is none": {"requires_python": "===banana"},
    "an exact requirement of nothing": {"requires_dist": ("telescope-core===banana",)},
    "a long summary": {"summary": "x" * 100_000},
    "a long record": {"resources": {str(i): "x" * 900 for i in range(400)}},
}


def line(**fields) -> bytes:
    return index_line(toy_publication(**fields).release)


def as_sent(name: str, version: str = "0.2.0") -> str:
    """Return a hostile record as JSON that a program other than ours may send."""
    release = publication_now(version, **HOSTILE_RECORDS[name]).release
    return json.dumps(msgspec.to_builtins(release))


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_no_store_admits_a_record_that_no_reader_accepts(registry, name):
    publication = toy_publication(**HOSTILE_RECORDS[name])
    with pytest.raises(RegistryError, match="the record of acme/toy"):
        registry.store.publish(publication)
    assert registry.catalog() == []


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_no_server_admits_it_and_the_name_stays_usable(tmp_path, name):
    with served(tmp_path / "hub") as hub, Sender(hub.address, hub.token()) as sender:
        answer = sender.publish(publication_now("0.2.0"), record=as_sent(name))
        assert answer.status_code in (400, 422), answer.text
        assert sender.publish(publication_now("0.2.0")).status_code == 201
        assert sender.get("environments/acme/toy").status_code == 200


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_a_check_finds_it(registry_place, name):
    path = registry_place / "index/acme/toy.jsonl"
    path.write_bytes(path.read_bytes() + as_sent(name).encode() + b"\n")
    found = {(one.check, one.where) for one in check_registry(registry_place).findings}
    assert ("index-line", f"{path.relative_to(registry_place)}:2") in found


DECLARED = {
    "reward_max = float('nan')": "reward_max must be a finite number",
    "reward_max = -1.0": "reward_min must be below reward_max, got 0 and -1",
    "secrets = ('\\x1b[2J',)": "not the name of an environment variable",
    "network: str = 'sometimes'": "network",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "declared",
    [
        "secrets = ('\\x1b[2J',)",
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in DECLARED
            if "secrets" not in other
        ),
    ],
)
def test_what_an_environment_declares_is_checked_where_it_is_published(
    registry, make_project, declared
):
    code = TOY.replace('"""Says yes."""', f'"""Says yes."""\n\n    {declared}')
    with pytest.raises(TelescopeError, match=rf"\.whl\b.*{DECLARED[declared]}"):
        publish(registry.store, make_project(code=code), owner="acme", datasets=[])


SPELLINGS = ("0.1.0", "0.1", "0.2.0", "0.2.0rc1")


@cache
def line_of(version: str, number: int) -> bytes:
    return index_line(toy_publication(version, code=f"Toy = {number}\n").release)


@pytest.mark.slow
@given(st.lists(st.sampled_from(SPELLINGS), max_size=5))
def test_only_a_version_with_one_line_is_read_and_the_check_agrees(tmp_path_factory, versions):
    place = tmp_path_factory.mktemp("registry") / "registry"
    registry = write_registry(place)
    lines = [line_of(version, number) for number, version in enumerate(versions)]
    (place / "index/acme").mkdir()
    (place / "index/acme/toy.jsonl").write_bytes(b"".join(lines))
    known = [*map(Version, versions)]
    alone = [one for one in versions if known.count(Version(one)) == 1]
    found = read_releases(b"".join(lines), "acme/toy", "index")
    assert [one.version for one in found.releases] == alone
    assert [one.version for one in found.unreadable] == [v for v in versions if v not in alone]
    assert set(published_versions(registry.store.read, "acme/toy")) == set(versions)
    findings = read_tree(place, now=datetime.now(UTC)).findings
    twice = [one for one in findings if one.check == "version-once"]
    assert len(twice) == len(versions) - len({*known})


def test_another_wheel_for_a_version_is_not_installed(registry_place, home):
    path = registry_place / "index/acme/toy.jsonl"
    other = toy_publication(code="Toy = 'evil'\n")
    registry = Registry.at(registry_place)
    assert resolve(registry, "toy").version == "0.1.0"
    path.write_bytes(path.read_bytes() + index_line(other.release))
    for asked in ("toy", "toy@0.1.0", f"toy@sha256:{other.release.wheel.sha256}"):
        with pytest.raises(RegistryError, match=r"toy\.jsonl:1: 0\.1\.0 has more than one line"):
            resolve(registry, asked)
    path.write_bytes(path.read_bytes() + line(version="0.2.0"))
    assert resolve(registry, "toy").version == "0.2.0", "the others stay usable"


LEFT = {
    "null for NaN": line(version="0.2.0").replace(b'"success":1.0', b'"success":null'),
    "NaN": line(version="0.2.0").replace(b'"success":1.0', b'"success":NaN'),
    "a negative split": line(version="0.2.0").replace(b'"train":1', b'"train":-1'),
    "a newer schema": line(version="0.2.0").replace(b'"schema":1', b'"schema":9'),
    "a separator": line(version="0.2.0").replace(b"Says", "Sa\u2028ys".encode()),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_registry_with_such_a_line_stays_usable(published, caplog, name):
    place = Path(published.address)
    index = place / "index/acme/toy.jsonl"
    index.write_bytes(index.read_bytes() + LEFT[name])
    (row,) = Registry.at(place).catalog()
    assert (row.version, row.num_releases) == ("0.1.0", 1)
    assert resolve(Registry.at(place), "toy").version == "0.1.0"
    assert "index/acme/toy.jsonl:2" in caplog.text
    with pytest.raises(RegistryError, match=r"no version '0.2.0'.*toy.jsonl:2"):
        resolve(Registry.at(place), "toy@0.2.0")
    with pytest.raises(RegistryError, match=r"0.2.0 is already published with different bytes"):
        published.store.publish(toy_publication("0.2.0", code="other = 1\n"))
    assert published.store.publish(toy_publication("0.3.0"))
    yank(published.store, "acme/toy@0.2.0", reason="its record cannot be read")
    assert resolve(Registry.at(place), "toy").version == "0.3.0"


@pytest.mark.parametrize("text", [b"\n", b"{}\n", b'{"version":"x"}\n', b"{", b"\xff\n"])
def test_nothing_is_published_after_a_line_without_a_version(published, text):
    index = Path(published.address) / "index/acme/toy.jsonl"
    index.write_bytes(index.read_bytes() + text)
    with pytest.raises(RegistryError, match="Nothing can be published after such a line"):
        published.store.publish(toy_publication("0.3.0"))
    assert resolve(published, "toy").version == "0.1.0"


def test_a_server_that_stored_null_for_nan_recovers(tmp_path):
    with served(tmp_path / "hub") as hub, Sender(hub.address, hub.token()) as sender:
        hub.store.publish(toy_publication())
        with hub.store.database.transaction() as writer:
            writer.execute(
                "INSERT INTO releases (environment, version, distribution, line, received_at, "
                "token) SELECT environment, '0.2.0', distribution, ?, '', '' FROM releases",
                (LEFT["null for NaN"].decode(),),
            )
        for path in (
            "",
            "environments/acme/toy",
            "v1/index.json",
            "simple/telescope-env-acme-toy/",
        ):
            assert sender.get(path).status_code == 200
        other = publication_now("0.2.0", code="other = 1\n")
        assert sender.publish(other).status_code == 409
        assert sender.publish(publication_now("0.3.0")).status_code == 201
        etag = sender.get("status/acme/toy.json").headers["etag"]
        answer = sender.put(
            "api/status/acme/toy",
            content=b'{"yanked":{"0.2.0":"its record cannot be read"}}',
            headers={"If-Match": etag},
        )
        assert answer.status_code == 200, answer.text


def test_one_bad_record_costs_only_its_environment(registry, caplog):
    place = Path(registry.address)
    for name in ("fine", "no-line", "no-status"):
        registry.store.publish(toy_publication(name=name))
    (place / "index/acme/no-line.jsonl").write_bytes(b'{"version": NaN}\n')
    (place / "status/acme/no-status.json").write_bytes(b'{"yanked": []}')
    assert [row.id for row in registry.catalog()] == ["acme/fine"]
    assert "skipped: index/acme/no-line.jsonl:1: not JSON" in caplog.text
    assert "skipped: status/acme/no-status.json: yanked" in caplog.text


def test_many_bad_records_are_counted_and_escaped(registry, caplog):
    (place,) = [Path(registry.address) / "index/acme/toy.jsonl"]
    place.parent.mkdir()
    place.write_bytes(b"{}\n" * 50 + line().replace(b'"train":1', b'"\\u001b[2J":"x"'))
    assert registry.catalog() == []
    assert len(caplog.records) == 6
    assert "skipped 46 more records" in caplog.text
    assert "\x1b" not in caplog.text


VALUES = [
    *("", "x", "\x1b[2J", "a\u2028b", "\u202e", "\U0001f600", "a\nb", "x" * 1001, '"', "\\", "a/b"),
    *(None, True, 0, -1, 1, 2, 1.0, 0.5, 1e300, 2**63, 2**70, math.nan, math.inf),
    *([], {}, [None], ["x"], ["x\x07"], {"x": 1}, {"x": -1}, {"x": "y"}, {"\x1b": None}),
    *("1.0", "01.0", "1.0+x", "1!1.0", "1.0rc1", ">=3.11", "=>3", "1.1\n", "99999999999.0"),
    *("2026-11-21T12:00:00Z", "2026-11-21 12:00:00", "2026-11-21T12:00:00", "2026-13-01T00:00:00Z"),
    *("2026-11-21T12:00:00+00:00", "2026-11-21T12:00:00+23:59", "0000-01-01T00:00:00Z"),
]


def fields_of(record: dict, *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in record.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields_of(value, *path, key)


def changed(record: dict, path: tuple[str, ...], value: object) -> dict:
    """Return `record` with the field at `path` replaced, or removed by ..., or renamed."""
    head, *rest = path
    if rest:
        return {**record, head: changed(record[head], tuple(rest), value)}
    if value is ...:
        return {key: kept for key, kept in record.items() if key != head}
    return {**record, head: value}


def mutants(record: bytes) -> Iterator[bytes]:
    """Yield records with one field, or a few bytes, changed."""
    fields = json.loads(record)
    for path in [*fields_of(fields), ("unknown",), ("schema_version",)]:
        for value in [..., *VALUES]:
            yield json.dumps(changed(fields, path, value), ensure_ascii=False).encode() + b"\n"
            yield json.dumps(changed(fields, path, value)).encode() + b"\n"
    generator = random.Random(20261123)
    pieces = [
        b"",
        b"\n",
        b"\r",
        b" ",
        b'"',
        b"\\",
        b"\xff",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
    ]
    for _ in range(NUM_RANDOM):
        start = generator.randrange(len(record) + 1)
        end = min(len(record), start + generator.choice([0, 0, 1, 1, 2, 40]))
        piece = generator.choice([*pieces, bytes([generator.randrange(256)])])
        yield record[:start] + piece + record[end:]


@pytest.mark.slow
def test_lists_and_installs_read_the_same_records():
    """Rows count exactly the releases that can be installed, whatever is in the other lines."""
    record = line(tags=("a", "b"), requires_dist=('x; extra == "y"',), secrets=("KEY",))
    num_read = num_refused = 0
    for text in mutants(record):
        whole = read_releases(text, "acme/toy", "index/acme/toy.jsonl")
        found = catalog_row("acme/toy", text, None)
        assert [one.where for one in found.unreadable] == [one.where for one in whole.unreadable]
        assert (found.row.num_releases if found.row else 0) == len(whole.releases), text
        num_read += len(whole.releases)
        num_refused += len(whole.unreadable)
        for release in whole.releases:
            assert read_releases(index_line(release), "acme/toy", "x").releases == [release], text
    assert min(num_read, num_refused) > 700


SEPARATOR = "\u2028".encode()


@pytest.mark.parametrize(
    "data",
    [
        line()[:-2] + b',"x":"' + SEPARATOR[:1] + b'"}\n' + SEPARATOR[1:] + line(),
        line()[:-2] + b',"x":"' + SEPARATOR[:1] + b"\n" + SEPARATOR[1:] + b'"}\n',
        line()[:-2] + b',"x":"\n"}\n',
        line() + b"{\n}\n",
        line()[:-1] + b"," + line(version="0.2.0") + b"\n",
        line()[:-1] + line(version="0.2.0"),
    ],
)
def test_nothing_is_read_across_the_end_of_a_line(data):
    assert read_releases(data, "acme/toy", "x").unreadable


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [b"\n"]),
        (b"a\nb", [b"a\n", b"b"]),
        (b"a\n\nb\n", [b"a\n", b"\n", b"b\n"]),
        (b"a\rb\r\nc\x0bd\x1ce\n", [b"a\rb\r\n", b"c\x0bd\x1ce\n"]),
        (b"a\x0bb\x0c\x85\xe2\x80\xa8c\n", [b"a\x0bb\x0c\x85\xe2\x80\xa8c\n"]),
    ],
)
def test_only_a_newline_ends_a_line(data, lines):
    assert index_lines(data) == lines


def test_lists_and_commands_read_the_same_statuses():
    record = (
        b'{"schema": 1, "yanked": {"0.1.0": "wrong"}, "deprecated": {"reason": "old", '
        b'"replacement": "a/b"}, "advisories": ["x"]}'
    )
    release, num_read = line(), 0
    for text in mutants(record):
        row = catalog_row("acme/toy", release, text).row
        try:
            status = parse_status(text, "status")
        except RegistryError:
            assert row is None, text
            continue
        num_read += 1
        assert row is not None, text
        reason = status.deprecated.reason if status.deprecated else ""
        yanked = status.yanked.get("0.1.0")
        expected = reason or (f"every version is yanked: {yanked}" if yanked is not None else "")
        assert row.deprecated == expected, text
    assert num_read > 700
