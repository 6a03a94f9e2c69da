"""Hidden tests stay outside; what goes wrong inside is the program's failure, and only that."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.sandboxes import CallTest, SandboxError, SandboxSpec, StdinTest, grade_program
from telescope_core.sandboxes.grading import call_function, same_json, same_output

ADD = "def add(a, b):\n    return a + b\n"
CALLS = [CallTest(function="add", arguments=[n, 2], expected=n + 2) for n in (1, 5, -9)]
EQUALS_ALL = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 1
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter(())
    def __call__(self, *a, **k): return self
def add(*a, **k): return Same()
"""


@pytest.mark.slow
async def test_a_right_program_passes_and_a_wrong_one_says_what_it_returned(box):
    grade = await grade_program(box, ADD, CALLS)
    assert (grade.passed, grade.num_passed, grade.fraction) == (True, 3, 1.0)
    wrong = await grade_program(box, ADD.replace("+", "-"), CALLS)
    assert (wrong.passed, wrong.fraction, len(wrong.outcomes)) == (False, 0.0, 1)
    assert wrong.outcomes[0].reason == "wrong value: -1"
    half = "def add(a, b):\n    return 3"
    all_run = await grade_program(box, half, CALLS, stop_at_failure=False)
    assert [one.passed for one in all_run.outcomes] == [True, False, False]
    assert (await grade_program(box, ADD, [])).passed is False


async def test_methods_classes_keywords_and_prints_of_the_program(box):
    program = (
        "print('noise')\nclass Solution:\n    def solve(self, x, times=1):\n"
        "        print('{\"value\": 0}')\n        return (x * times, {1: None})"
    )
    test = CallTest(
        function="Solution.solve",
        arguments=["a"],
        keywords={"times": 2},
        expected=["aa", {"1": None}],
    )
    assert (await grade_program(box, program, [test])).passed


HONEST = {
    "begins with a byte order mark": f"\ufeff{ADD}",
    "dataclasses of written types": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Pair:\n    a: int\n    b: int\n"
        "def add(a, b):\n    pair = Pair(a, b)\n    return pair.a + pair.b"
    ),
    "pickles its own": (
        "import pickle\nclass Box:\n    def __init__(self, value): self.value = value\n"
        "def add(a, b): return pickle.loads(pickle.dumps(Box(a + b))).value"
    ),
    "has its types read": (
        "import typing\ndef add(a: 'Number', b: 'Number'): return a + b\nNumber = int\n"
        "typing.get_type_hints(add)"
    ),
}


@pytest.mark.parametrize("program", HONEST.values(), ids=HONEST)
async def test_a_program_runs_as_it_would_in_a_file(box, program):
    assert (await grade_program(box, program, CALLS[:1])).passed
    called = await call_function(box, program, "add", [(1, 2)])
    assert called.values == (3,), called


CHEATS = {
    "equal to everything": EQUALS_ALL,
    "a number that equals everything": (
        "class Same(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Same(0)"
    ),
    "ends early": "import os\nos._exit(0)",
    "ends early by SystemExit": "raise SystemExit(0)",
    "crashes": "import ctypes\ndef add(a, b): ctypes.string_at(0)",
    "kills everything": "import os\ndef add(a, b):\n    os.kill(0, 9)",
    "floods": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "hangs": "def add(a, b):\n    while True: pass",
    "takes all memory": "def add(a, b):\n    x = []\n    while True: x.append(b'x' * (1 << 20))",
    "nests without end": (
        "def add(a, b):\n    x = []\n    for _ in range(99999): x = [x]\n    return x"
    ),
    "writes deep JSON": (
        "import os\ndef add(a, b):\n    os.write(3, b'[' * 200000)\n    os._exit(0)"
    ),
    "replaces json": "import json\njson.dump = lambda *a: None\ndef add(a, b): return 0",
    "huge number": "def add(a, b): return 10 ** 5000",
    "not a number": "def add(a, b): return float('nan')",
    "true for one": "def add(a, b): return True",
    "nothing": "",
}


ENDLESS = {"floods", "hangs"}
"""What ends at its time limit alone; the others have time to come to their end."""


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_cheat_stays_at_the_floor_and_raises_nothing(box, cheat):
    tests = [CallTest(function="add", arguments=[1, 0], expected=1), *CALLS]
    limit_s = 0.2 if cheat in ENDLESS else 60.0
    grade = await grade_program(box, CHEATS[cheat], tests, timeout_s=limit_s, tolerance=1e-6)
    assert grade.fraction == 0.0, grade
    assert (await grade_program(box, ADD, CALLS)).passed, "a sandbox that the next one can use"


WAITS = "import time\ntime.sleep(1.2)\n"


@pytest.mark.slow
async def test_only_processor_time_counts_so_a_busy_machine_fails_no_program(box):
    tests = [StdinTest(stdin="", expected="3")]
    grades = [
        await grade_program(box, f"{WAITS}print(3)", tests, timeout_s=0.5),
        await grade_program(box, f"{WAITS}{ADD}", CALLS[:1], timeout_s=0.5),
    ]
    called = await call_function(box, f"{WAITS}{ADD}", "add", [(1, 2)], timeout_s=0.5)
    assert [grade.passed for grade in grades] == [True, True], grades
    assert called.values == (3,), called


@pytest.mark.slow
async def test_a_program_that_computes_or_waits_too_long_is_told(box):
    tests = [StdinTest(stdin="", expected="3")]
    for program in ("while True: pass", "import time\ntime.sleep(600)"):
        (outcome,) = (await grade_program(box, program, tests, timeout_s=0.1)).outcomes
        assert outcome.reason == "took too long", program


async def test_no_hidden_test_can_be_found_from_inside(box):
    """Neither what is expected nor the other tests, in memory, files, arguments or variables."""
    secret = 918273645
    search = (
        "import gc, glob, os, sys\n"
        "def add(a, b):\n"
        "    kinds = (dict, list, tuple)\n"
        "    seen = [repr(o)[:9999] for o in gc.get_objects() if isinstance(o, kinds)]\n"
        "    for p in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ')"
        " + glob.glob('/tmp/**', recursive=True):\n"
        "        try: seen.append(open(p, errors='replace').read())\n"
        "        except OSError: pass\n"
        "    needle = ''.join(['9182', '73645'])\n"
        "    return any(needle in s for s in seen)\n"
    )
    hidden = CallTest(function="add", arguments=[secret, 0], expected=secret)
    first = CallTest(function="add", arguments=[1, 1], expected=False)
    other = CallTest(function="add", arguments=[2, 2], expected=False)
    grade = await grade_program(box, search, [first, other, hidden], stop_at_failure=False)
    assert [one.passed for one in grade.outcomes] == [True, True, False], grade
    assert grade.outcomes[2].reason == "wrong value: true", (
        "its own input is found: the search works"
    )


async def test_standard_input_and_output(box):
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nprint('done  ')"
    tests = [
        StdinTest(stdin="1 2\n3", expected="6\ndone\n"),
        StdinTest(stdin="", expected="0\ndone"),
    ]
    assert (await grade_program(box, program, tests)).passed
    grade = await grade_program(box, "print(7)", tests)
    assert grade.outcomes[0].reason == "wrong output: 7"
    grade = await grade_program(box, "print(input())\n1/0", [StdinTest(stdin="a", expected="a")])
    assert grade.outcomes[0].reason.startswith("ended with exit code 1: ZeroDivisionError")


async def test_a_provider_that_fails_is_no_failure_of_the_program(shared):
    box = await shared.create(SandboxSpec())
    await box.close()
    with pytest.raises(SandboxError):
        await grade_program(box, ADD, CALLS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSON, JSON)
def test_values_are_the_same_when_their_json_is_but_for_whole_floats(value, other):
    assert same_json(value, json.loads(json.dumps(value)))

    def plain(one):
        if isinstance(one, float) and one.is_integer():
            return int(one)
        if isinstance(one, list):
            return [plain(x) for x in one]
        if isinstance(one, dict):
            return {k: plain(x) for k, x in one.items()}
        return one

    same_text = json.dumps(plain(value), sort_keys=True) == json.dumps(plain(other), sort_keys=True)
    assert same_json(value, other) == same_text


def test_tolerance_is_for_numbers_alone():
    assert same_json([1.0000001, "a"], [1, "a"], 1e-6)
    assert not same_json([1.1, "a"], [1, "a"], 1e-6)
    assert not same_json(True, 1, 1e-6)
    assert not same_json(10**400, 1.5, 1e-6)
    assert not same_json(math.inf, 1.5, 1e-6)
    assert not same_json(math.nan, 1.5, 1e-6)
    assert same_output("0.3333333 x\n", "0.33333331  x", 1e-6)
    assert not same_output("0.33 x", "0.34 x", 1e-6)
    assert same_output("a  \nb\n\n", "a\nb")
    assert same_output("a b", "a\t b")
    assert not same_output("a b", "ab")
    assert not same_output("1 2", "1\n2")


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_numbers_in_an_output_count_by_their_worth_and_whole_ones_as_they_stand(tolerance):
    for came, wanted in [("1.50", "1.5"), ("3.0", "3"), ("1e3", "1000"), ("-0.0", "0.0")]:
        assert same_output(came, wanted, tolerance), (came, wanted)
        assert same_output(wanted, came, tolerance), (came, wanted)
    huge = ["1e999999999", "1e9999", f"1.{'0' * 100_000}1e9999", "9" * 100_000 + ".5"]
    for came, wanted in [
        *(("1000000006", "1000000007"), ("101", "0101"), ("1000000006.0", "1000000007")),
        *(("100000000000000001", "100000000000000000.0"), ("1e17", "100000000000000001")),
        *(("nan", "1.0"), ("NaN", "nan"), ("inf", "1e9"), ("inf", "1.0"), ("1_0.0", "10")),
        *((one, "1.5") for one in huge),
        *((one, "1e999999998") for one in huge),
    ]:
        assert not same_output(came, wanted, tolerance), (came[:30], wanted)
        assert not same_output(wanted, came, tolerance), (came[:30], wanted)
    assert not same_json(1000000006, 1000000007, tolerance)
    assert not same_json(2000001.0, 2000000.0, tolerance)
    assert not same_output("123456690.0", "123456790.00", tolerance)
    assert same_output("123456790.5", "123456790.25", tolerance) == bool(tolerance)
    assert same_json(1e18, 1e18 + 128, tolerance) == bool(tolerance)
    assert not same_json(1000000006.0, 1000000007, tolerance)
    assert same_json(2.0, 2, tolerance)


async def test_a_program_that_cannot_be_started_has_failed(box):
    for program in (f"{ADD}# \0", f"{ADD}{'#' * 200_000}", f"{ADD}# \ud800"):
        grade = await grade_program(box, program, CALLS)
        assert (grade.passed, len(grade.outcomes)) == (False, 1)
        assert grade.outcomes[0].reason.startswith("the program h")


async def test_any_of_several_values_may_be_right(box):
    test = CallTest(function="add", arguments=[1, 2], expected=[3], alternatives=[7, 3])
    assert (await grade_program(box, ADD, [test])).passed
    assert not (await grade_program(box, ADD.replace("+", "-"), [test])).passed
