"""Rows of a catalogue: which version they show, in which order a search finds them."""

import pytest
from tests.envs.projects import toy_publication

from telescope_core.errors import RegistryError
from telescope_envs.records.catalog import (
    CatalogRow,
    catalog_row,
    newest_version,
    read_catalog,
    search,
    write_catalog,
)
from telescope_envs.records.release import Validation
from telescope_envs.rules.admission import index_line


@pytest.mark.parametrize(
    ("versions", "yanked", "newest"),
    [
        (["0.9.0", "0.10.0"], [], "0.10.0"),
        (["0.10.0", "0.9.0"], [], "0.10.0"),
        (["0.9", "0.10"], ["0.10"], "0.9"),
        (["0.9", "1.0rc1"], [], "0.9"),
        (["1.0rc1", "1.0.dev4"], [], "1.0rc1"),
        (["1.0", "1.0.post1"], [], "1.0.post1"),
        (["0.1", "0.2rc1"], ["0.1"], "0.2rc1"),
        (["0.1", "0.2"], ["0.1", "0.2"], "0.2"),
    ],
)
def test_the_version_that_is_shown(versions, yanked, newest):
    assert versions[newest_version(versions, dict.fromkeys(yanked, "why"))] == newest


def line(version: str, **fields) -> bytes:
    return index_line(toy_publication(version, **fields).release)


def row_of(index: bytes, status: bytes | None = None) -> CatalogRow:
    """Return the row of acme/toy, with no record skipped."""
    row, unreadable = catalog_row("acme/toy", index, status)
    assert row is not None
    assert unreadable == []
    return row


def test_a_row_is_made_of_the_version_it_shows():
    index = line("0.1.0", validation=Validation(verdict="warn", policy="1"))
    row = row_of(index + line("0.2.0", license="GPL"), b'{"yanked":{"0.2.0":"why"}}')
    assert (row.version, row.license, row.verdict, row.num_releases) == ("0.1.0", "MIT", "warn", 2)


def test_what_is_wholly_yanked_says_so():
    row = row_of(line("0.1.0"), b'{"yanked":{"0.1.0":"wrong"}}')
    assert row.deprecated.endswith("yanked: wrong")
    assert row_of(line("0.1.0") + line("0.2.0"), b'{"yanked":{"0.1.0":"wrong"}}').deprecated == ""


@pytest.mark.parametrize(
    ("index", "status", "why"),
    [
        (line("0.1.0")[:-1], None, "index/acme/toy.jsonl:1: the last line has no newline"),
        (b'{"version":1,"summary":""}\n', None, "index/acme/toy.jsonl:1: version: Expected str"),
        (line("0.1.0").replace(b"0.1.0", b"one"), None, "'one' is not a PEP 440 version"),
        (line("0.1.0"), b"[]", "status/acme/toy.json: record"),
        (b"\xff\n", None, "index/acme/toy.jsonl:1: not JSON"),
        (line("0.1.0").replace(b"Says", b"\\u001b[2J"), None, "summary: contains control"),
        (line("0.1.0"), b'{"deprecated":{"reason":"\\u0007"}}', "deprecated.reason"),
        (line("0.1.0", name="other"), None, "contains a release of acme/other"),
    ],
)
def test_defects_are_skipped_and_named(index, status, why):
    row, (unreadable,) = catalog_row("acme/toy", index, status)
    assert row is None
    assert why in unreadable.why


def test_a_defect_costs_one_line():
    index = line("0.1.0") + b"{}\n" + line("0.2.0")
    row, (unreadable,) = catalog_row("acme/toy", index, None)
    assert (row.version, row.num_releases) == ("0.2.0", 2)
    assert unreadable.where == "index/acme/toy.jsonl:2"


def test_odd_lines_that_are_right_are_shown():
    index = line("0.1.0", summary='\u00fc \u2713 "quoted"')
    (row, _), odd = catalog_row("acme/toy", index, None), index.replace(b"\xc3\xbc", b"\\u00fc")
    assert row.summary == '\u00fc \u2713 "quoted"'
    assert catalog_row("acme/toy", odd, None).row == row


def test_an_empty_index_file_has_no_row():
    assert catalog_row("a/b", b"", None) == (None, [])


def test_a_catalogue_is_written_and_read_by_id():
    rows = [CatalogRow(id=name, version="1", summary="\u2713") for name in ("b/a", "a-b/c", "a/b")]
    read = read_catalog(write_catalog(rows), "x").rows
    assert [row.id for row in read] == ["a-b/c", "a/b", "b/a"]
    with pytest.raises(RegistryError, match=r"here: .*render the registry again"):
        read_catalog(b"{}", "here")


@pytest.mark.parametrize(
    "bad", [b"{}", b"1", b'{"id":"a/b","version":"1","summary":"\\u001b]0;x\\u0007"}']
)
def test_a_bad_row_of_a_catalogue_is_skipped_and_named(bad):
    good = b'{"id":"a/c","version":"1","summary":"s"}'
    rows, (unreadable,) = read_catalog(b"[" + bad + b"," + good + b"]", "here")
    assert [row.id for row in rows] == ["a/c"]
    assert "here, row 1: " in unreadable.why


ROWS = [
    CatalogRow(id="acme/math", version="1", summary="Sums", tags=("numbers",)),
    CatalogRow(id="acme/math-reasoning", version="1", summary="Proofs", tags=("Numbers", "long")),
    CatalogRow(id="acme/aftermath", version="1", summary="What comes then"),
    CatalogRow(id="corp/word-math", version="1", summary="Stories"),
    CatalogRow(id="corp/puzzles", version="1", summary="With some maths", tags=("game",)),
    CatalogRow(id="corp/geometry", version="1", summary="Shapes", tags=("math",)),
    CatalogRow(id="corp/old-math", version="1", summary="Sums", deprecated="too easy"),
    CatalogRow(id="corp/wordle", version="1", summary="A word", tags=("game", "multi-turn")),
]


@pytest.mark.parametrize(
    ("query", "tags", "names"),
    [
        ("math", (), "math math-reasoning word-math geometry aftermath puzzles old-math"),
        ("Math Reasoning", (), "math-reasoning"),
        ("acme/math", (), "math math-reasoning aftermath"),
        ("math stories", (), "word-math"),
        ("mth", (), ""),
        ("wrodle", (), "wordle"),
        ("w0rdle", (), "wordle"),
        ("corp game", (), "puzzles wordle"),
        ("turn", (), "wordle"),
        ("", ("game",), "puzzles wordle"),
        ("", ("numbers", "long"), "math-reasoning"),
        ("math", ("numbers",), "math math-reasoning"),
        ("", (), "aftermath math math-reasoning geometry puzzles word-math wordle old-math"),
        ("chess", (), ""),
    ],
)
def test_the_best_rows_come_first(query, tags, names):
    assert [row.id.partition("/")[2] for row in search(ROWS, query, tags)] == names.split()
