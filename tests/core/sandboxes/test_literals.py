"""Functions of programs called with plain Python values, which alone come back."""

import copy
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.sandboxes import call_function
from telescope_core.sandboxes.grading import MAX_DEPTH, TooManyError, decoded, encoded

ALONE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    ALONE,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(ALONE)
        | st.frozensets(ALONE)
        | st.dictionaries(ALONE | st.tuples(ALONE, ALONE), inner)
    ),
    max_leaves=12,
)


def kinds(value: object) -> object:
    """Return a value with the type of each part, since 1 == True == 1.0."""
    if isinstance(value, dict):
        return dict, sorted(repr((kinds(key), kinds(one))) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(kinds(one)) for one in value)
    if isinstance(value, list | tuple):
        return type(value), [kinds(one) for one in value]
    return type(value), repr(value)


@pytest.mark.slow
@given(VALUES)
def test_values_keep_their_types(value):
    assert kinds(decoded(encoded(value))) == kinds(value)


async def test_values_keep_their_types_through_a_program(box):
    calls = [([1, (2, {3})],), ({1: "a", (2,): None},), (True,), (0.5,), (frozenset({"x"}),)]
    returned = await call_function(box, "def same(x): return x", "same", calls)
    assert returned.reason == ""
    assert list(map(kinds, returned.values)) == [kinds(one) for (one,) in calls]


SUBCLASSES = """
from collections import Counter, OrderedDict, defaultdict, namedtuple
lies = dict(
    __eq__=lambda *a: True, __hash__=lambda s: 1, __iter__=lambda s: iter([9]), __len__=lambda s: 9,
    items=lambda s: [(9, 9)], __int__=lambda s: 9, __float__=lambda s: 9.0, __str__=lambda s: "9",
    __index__=lambda s: 9, __getitem__=lambda s, k: 9, __repr__=lambda s: "9",
)
kinds = [type("Lie", (one,), lies) for one in (int, float, str, list, tuple, set, frozenset, dict)]
def f(which):
    if which == "lies":
        return [k(v) for k, v in zip(kinds, (3, .5, "a", [1], (1,), {1}, {1}, {1: 2}.items()))]
    several = defaultdict(list)
    several["a"].append(Counter("b"))
    return [several, OrderedDict(c=1), namedtuple("Pair", "x y")(1, True)]
"""


async def test_values_of_subclasses_come_back_plain_whatever_their_own_methods_say(box):
    returned = await call_function(box, SUBCLASSES, "f", [("honest",), ("lies",)])
    assert returned.reason == ""
    honest = [{"a": [{"b": 1}]}, {"c": 1}, (1, True)]
    plain = [3, 0.5, "a", [1], (1,), {1}, frozenset({1}), {1: 2}]
    assert list(map(kinds, returned.values)) == [kinds(honest), kinds(plain)]


async def test_each_call_gets_arguments_of_its_own(box):
    program = "def grow(x):\n    x.append(len(x))\n    return x"
    returned = await call_function(box, program, "grow", [([],)] * 2)
    assert returned.values == ([0], [0])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("class A: pass\ndef f(): return A()", "a value of type A was returned"),
        ("class A:\n    __class__ = dict\ndef f(): return A()", "TypeError"),
        ("def f(): return [object()]", "a value of type object was returned"),
        ("def f(): return f", "a value of type function was returned"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "RecursionError"),
        ("import os\ndef f(): os._exit(0)", "no values came back"),
        ("import os\ndef f():\n    os.write(3, b'[1, 2]')\n    os._exit(0)", "no values came back"),
        ("import os\ndef f():\n    os.write(3, b'{}')\n    os._exit(0)", "no values came back"),
        ("import os\ndef f():\n    os.write(3, b'[[1]]')\n    os._exit(0)", "no values came back"),
        ("def g(): pass", "KeyError: 'f'"),
        ("def f(): return chr(0xd800)", ""),
        ("# \0", "the program holds a NUL character"),
        ("#" * 200_000, "the program has 200000 bytes, more than 100000"),
        ("# \ud800", "the program holds characters that are no Unicode text"),
    ],
)
async def test_what_is_no_plain_value_is_the_programs_failure(box, program, reason):
    returned = await call_function(box, program, "f", [()])
    assert reason in returned.reason
    assert bool(returned.values) == (not reason)


@pytest.mark.parametrize("text", [[1], {}, {"list": 1}, {"list": [], "set": []}, {"dict": [[1]]}])
def test_json_that_encoded_never_writes_is_refused(text):
    with pytest.raises((TypeError, ValueError)):
        decoded(text)
    with pytest.raises(KeyError):
        decoded({"object": []})


def test_objects_are_not_encoded():
    with pytest.raises(TypeError, match="got object"):
        encoded([object()])


MODULUS = sys.hash_info.modulus
PAIRS = list(itertools.product([-1, -2], repeat=13))
COLLIDING = {
    "integers": [number * MODULUS for number in range(1, 8000)],
    "tuples of small integers": [{"tuple": list(one)} for one in PAIRS],
    "frozen sets": [{"frozenset": [number * MODULUS]} for number in range(1, 4000)],
    "frozen sets of frozen sets": [
        {"frozenset": [{"frozenset": [k * MODULUS]} for k in range(n, n + 30)]} for n in range(900)
    ],
    "integers in tuples": [{"tuple": ["a", n * MODULUS, 0.5]} for n in range(4000)],
    # Two of a kind are compared too.
    "the same again": [{"tuple": [0] * 50}] * 2000,
}


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
@pytest.mark.parametrize("members", COLLIDING.values(), ids=COLLIDING)
def test_members_of_equal_hash_are_refused_before_they_are_compared(kind, members):
    with pytest.raises(TooManyError, match="same hash"):
        decoded({kind: [[one, 0] for one in members] if kind == "dict" else members})


def test_one_limit_holds_for_all_values_of_an_answer():
    few = {"set": COLLIDING["integers"][:1500]}
    assert len(decoded(few)) == 1500
    with pytest.raises(TooManyError):
        decoded({"list": [few, few]})


def test_large_sets_are_taken_and_so_are_the_few_numbers_that_share_a_hash():
    large = {
        "set": [n << shift for shift in (0, 20, 40) for n in range(1 << shift % 7, 9000, 2)],
        "frozenset": [
            {"tuple": [x, y, z]} for x, y, z in itertools.product(range(-9, 9), repeat=3)
        ],
        "dict": [[x / 7, x] for x in range(-20_000, 20_000)],
    }
    for kind, members in large.items():
        assert len(decoded({kind: members})) == len(members)
    # -1 and -2 have the same hash in Python.
    near = set(itertools.product([-1, -2], repeat=7))
    assert decoded(encoded(near)) == near


def nested(depth, value=0):
    for _ in range(depth):
        value = (value,)
    return value


def test_values_are_no_deeper_than_graders_can_copy():
    assert copy.deepcopy(decoded(encoded(nested(MAX_DEPTH)))) == nested(MAX_DEPTH)
    with pytest.raises(TooManyError, match="nested deeper than"):
        decoded(encoded(nested(MAX_DEPTH + 1)))


@pytest.mark.slow
async def test_a_program_is_told_that_its_values_are_too_many(box):
    program = "def f(): return {n * (2**61 - 1) for n in range(1, 16_000)}"
    assert "same hash" in (await call_function(box, program, "f", [()])).reason
    deep = "def f():\n    x = 0\n    for _ in range(200): x = (x,)\n    return x"
    assert "nested deeper" in (await call_function(box, deep, "f", [()])).reason
