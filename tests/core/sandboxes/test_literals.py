"""Functions of programs called with plain Python values, which alone come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.sandboxes import call_function
from telescope_core.sandboxes.literals import decoded, encoded

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


@given(VALUES)
def test_values_keep_their_types(value):
    assert kinds(decoded(encoded(value))) == kinds(value)


async def test_values_keep_their_types_through_a_program(box):
    calls = [([1, (2, {3})],), ({1: "a", (2,): None},), (True,), (0.5,), (frozenset({"x"}),)]
    returned = await call_function(box, "def same(x): return x", "same", calls)
    assert returned.reason == ""
    assert list(map(kinds, returned.values)) == [kinds(one) for (one,) in calls]


async def test_each_call_gets_arguments_of_its_own(box):
    program = "def grow(x):\n    x.append(len(x))\n    return x"
    returned = await call_function(box, program, "grow", [([],)] * 2)
    assert returned.values == ([0], [0])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("class A(int): pass\ndef f(): return A(3)", "a value of type A was returned"),
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
