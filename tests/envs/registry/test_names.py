"""Names and versions: what is allowed, what means the same, what is too much alike."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from telescope_core.errors import ConfigError
from telescope_envs.records.names import (
    check_name,
    check_owner,
    check_version,
    distribution_name,
    is_one_edit,
    near_names,
    parse_reserved,
    same_distribution_ids,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("owner", ["acme", "a1b", "a-b-c", "x" * 39])
def test_owners_that_are_allowed(owner):
    assert check_owner(owner) == owner


@pytest.mark.parametrize(
    "owner",
    [
        "",
        "ab",
        "x" * 40,
        "-acme",
        "acme-",
        "ac--me",
        "Acme",
        "ac_me",
        "ac.me",
        "acm\u00e9",
        "acme\n",
    ],
)
def test_owners_that_are_refused(owner):
    with pytest.raises(ConfigError, match="3 to 39") as refusal:
        check_owner(owner)
    assert repr(owner) in str(refusal.value)


def test_names_may_be_shorter_and_longer_than_owners():
    assert [check_name(name) for name in ("ab", "x" * 64)] == ["ab", "x" * 64]
    for name in ("a", "x" * 65):
        with pytest.raises(ConfigError, match="2 to 64"):
            check_name(name)


@pytest.mark.parametrize("version", ["0.1.0", "1.0.0rc1", "1.0.dev3"])
def test_versions_that_are_allowed(version):
    assert check_version(version) == version


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("1.0+local", "'1.0'"),
        ("v1.0", "'1.0'"),
        ("1.0.0-rc1", "'1.0.0rc1'"),
        ("01.2", "'1.2'"),
        ("2!1.0", "epoch"),
        ("newest", "PEP 440"),
        ("1.0\n", "'1.0'"),
        ("", "PEP 440"),
    ],
)
def test_versions_that_are_refused(version, advice):
    with pytest.raises(ConfigError, match=advice) as refusal:
        check_version(version)
    assert repr(version) in str(refusal.value)


def test_hyphens_join_owner_and_name_to_one_distribution():
    assert same_distribution_ids("a-b/c") == ["a/b-c"]
    assert same_distribution_ids("acme/toy") == []
    for other in same_distribution_ids("a-b/c-d"):
        assert distribution_name(*other.split("/")) == distribution_name("a-b", "c-d")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("countdow", ["countdown"]),
        ("countdownn", ["countdown"]),
        ("countbown", ["countdown"]),
        ("cuontdown", ["countdown"]),
        ("c0untd0wn", ["countdown"]),
        ("mathreasoning", ["math-reasoning"]),
        ("rnath-reasoning", ["math-reasoning"]),
        ("toolcalcu1ator", ["tool-calculator"]),
        ("countdown", []),
        ("countup", []),
        ("wordles-and-more", []),
    ],
)
def test_names_that_a_person_may_mistake(name, near):
    known = ["countdown", "math-reasoning", "tool-calculator", "wordle"]
    assert near_names(name, known) == near


def distance(one: str, other: str) -> int:
    """Optimal string alignment, by the table."""
    rows = [[i + j if not i * j else 0 for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            same = one[i - 1] == other[j - 1]
            best = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (not same))
            if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
                best = min(best, rows[i - 2][j - 2] + 1)
            rows[i][j] = best
    return rows[-1][-1]


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_one_edit_is_what_the_table_of_distances_says(one, other):
    assert is_one_edit(one, other) == (distance(one, other) == 1)


def test_reserved_names_are_read_and_compared_as_package_indexes_do():
    text = "scikit-learn\n# a comment\nEnv # the command\n\n"
    reserved = parse_reserved(text)
    assert reserved == {"scikit-learn", "env"}
    assert parse_reserved(text.encode("utf-8-sig")) == reserved
    assert canonicalize_name("Scikit_Learn") in reserved


def test_the_committed_list_holds_commands_packages_and_our_own():
    reserved = parse_reserved((ROOT / "registry/reserved.txt").read_text())
    assert {"env", "python", "torch", "numpy", "telescope", "telescope-core", "pip"} <= reserved
