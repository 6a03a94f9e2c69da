"""Rows of a catalogue: which version they show, in which order a search finds them."""

import pytest

from telescope_core.errors import RegistryError
from telescope_envs.registry.catalog import (
    CatalogRow,
    catalog_row,
    newest_version,
    read_catalog,
    search,
    write_catalog,
)


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


def line(version: str, **fields: str) -> str:
    extra = "".join(f',"{key}":{value}' for key, value in fields.items())
    return f'{{"version":"{version}","summary":"s"{extra}}}\n'


def test_a_row_is_made_of_the_version_it_shows():
    index = line("0.1", license='"MIT"', validation='{"verdict":"warn","policy":"1"}')
    index += line("0.2", license='"GPL"')
    row = catalog_row("a/b", index.encode(), b'{"yanked":{"0.2":"why"}}')
    assert (row.version, row.license, row.verdict, row.num_releases) == ("0.1", "MIT", "warn", 2)


def test_what_is_wholly_yanked_says_so():
    row = catalog_row("a/b", line("0.1").encode(), b'{"yanked":{"0.1":"wrong"}}')
    assert row.deprecated == "every version is yanked: wrong"


@pytest.mark.parametrize(
    ("index", "status", "where"),
    [
        (b'{"version":"1"', None, "index/a/b.jsonl"),
        (b'{"version":1,"summary":""}\n', None, "index/a/b.jsonl"),
        (b'{"version":"one","summary":""}\n', None, "Invalid version: 'one'"),
        (b'{"version":"1","summary":""}\n', b"[]", "status/a/b.json"),
        (b"\xff\n", None, "index/a/b.jsonl"),
    ],
)
def test_defects_name_the_file(index, status, where):
    with pytest.raises(RegistryError, match=where):
        catalog_row("a/b", index, status)


def test_what_a_terminal_would_obey_is_not_in_a_row():
    index = b'{"version":"1","summary":"\\u001b[2Jgone\\u202e","tags":["a\\nb"]}\n'
    row = catalog_row("a/b", index, b'{"deprecated":{"reason":"\\u0007"}}')
    assert row.summary == "\ufffd[2Jgone\ufffd"
    assert (row.tags, row.deprecated) == (("a\ufffdb",), "\ufffd")
    (read,) = read_catalog(b'[{"id":"a/b","version":"1","summary":"\\u001b]0;x\\u0007"}]', "")
    assert read.summary == "\ufffd]0;x\ufffd"
    assert catalog_row(
        "a/b", '{"version":"1","summary":"\u00fc \u2713"}\n'.encode(), None
    ).summary == ("\u00fc \u2713")


def test_an_empty_index_file_has_no_row():
    assert catalog_row("a/b", b"", None) is None


def test_a_catalogue_is_written_and_read_by_id():
    rows = [CatalogRow(id=name, version="1", summary="\u2713") for name in ("b/a", "a-b/c", "a/b")]
    assert [row.id for row in read_catalog(write_catalog(rows), "x")] == ["a-b/c", "a/b", "b/a"]
    with pytest.raises(RegistryError, match=r"here: .*render the registry again"):
        read_catalog(b"[{}]", "here")


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
