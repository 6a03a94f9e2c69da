"""The hidden tests of a problem, from the columns that different tables have them in. Pure.

Known are: `info` with `tests` inside, as in INTELLECT-3-RL; `{"inputs": [...], "outputs": [...],
"fn_name": ...}`, as in APPS and TACO; and lists of `{"input", "output", "testtype"}`, as in
LiveCodeBench, whose private tests are packed.
"""

import ast
import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from telescope_core import Example
from telescope_core.errors import ConfigError
from telescope_core.sandboxes import CallTest, StdinTest
from telescope_core.types import JsonValue

_COLUMNS = ("tests", "input_output", "test_cases", "info", "public_test_cases")
_MAX_UNPACKED = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test as its table has it: what goes in, and what must come out."""

    given: JsonValue
    expected: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """All tests of one problem."""

    cases: tuple[Case, ...]
    function: str = ""
    """The function that is called; empty when programs read standard input."""


def cases_of(example: Example) -> Cases:
    """Return the tests of a problem; raises ConfigError when they cannot be read.

    Public and private ones count together, and a test that is in both counts once.
    """
    try:
        found = _read(example.info)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zlib.error) as error:
        raise ConfigError(
            f"the tests of problem {example.id} cannot be read: {error!r:.200}; correct the row"
        ) from None
    if not found.cases:
        raise ConfigError(f"problem {example.id} has no tests; leave the row out of the dataset")
    return found


def chosen(cases: Sequence[Case], at_most: int) -> list[Case]:
    """Return at most `at_most` of the tests, evenly spread over their order; 0 returns all."""
    if not 0 < at_most < len(cases):
        return list(cases)
    return [cases[number * len(cases) // at_most] for number in range(at_most)]


def stdin_test(case: Case) -> StdinTest:
    """Return a test of a program that reads standard input; lists are lines."""
    return StdinTest(stdin=_lines(case.given), expected=_lines(case.expected))


def call_test(case: Case, function: str) -> CallTest:
    """Return a test of a function. Text holds one JSON value on each line, one for an argument.

    An expected value that is a list of one entry may also be meant to be that entry, as in APPS.
    """
    keywords: dict[str, JsonValue] = {}
    arguments: Sequence[JsonValue] = ()
    if isinstance(case.given, str):
        arguments = [_value(line) for line in case.given.split("\n") if line.strip()]
    elif isinstance(case.given, dict):
        keywords = case.given
    else:
        arguments = case.given if isinstance(case.given, list) else [case.given]
    expected = case.expected
    others: list[JsonValue] = []
    if isinstance(expected, str):
        others = [expected] if not isinstance(case.given, str) else []
        expected = _value(expected)
    elif isinstance(expected, list) and len(expected) == 1:
        others = [expected[0]]
    return CallTest(
        function=function,
        arguments=arguments,
        keywords=keywords,
        expected=expected,
        alternatives=others,
    )


def called_name(function: str, program: str) -> str:
    """Return the name to call: `function`, or `Solution.function` if it is only there."""
    if re.search(rf"^(?:async )?def {re.escape(function)}\b", program, re.MULTILINE):
        return function
    return f"Solution.{function}" if re.search(r"^class Solution\b", program, re.M) else function


def _read(info: Mapping[str, JsonValue]) -> Cases:
    cases: dict[str, Case] = {}
    function = _name(info.get("fn_name"))
    metadata = info.get("metadata")
    if metadata:
        function = function or _name(_parsed(metadata), "func_name")
    for column in (*_COLUMNS, "private_test_cases"):
        if info.get(column):
            value = info[column]
            packed = _unpacked if column == "private_test_cases" else _parsed
            found, name = _cases(packed(value))
            function = function or name
            cases.update({json.dumps([one.given, one.expected]): one for one in found})
    return Cases(cases=tuple(cases.values()), function=function)


def _cases(value: JsonValue) -> tuple[list[Case], str]:
    """Return the tests in one column, and the name of the function if it says one."""
    if isinstance(value, dict) and "tests" in value:
        found, name = _cases(_parsed(value["tests"]))
        return found, name or _name(value, "fn_name")
    if isinstance(value, dict) and "inputs" not in value:
        return [], _name(value, "fn_name")
    if isinstance(value, dict):
        inputs = cast(list[JsonValue], value["inputs"])
        outputs = cast(list[JsonValue], value["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        pairs = zip(inputs, outputs, strict=True)
        return [Case(given=a, expected=b) for a, b in pairs], _name(value, "fn_name")
    rows = cast(list[dict[str, JsonValue]], value)
    names = [_name(row.get("metadata"), "func_name") or _name(row, "fn_name") for row in rows]
    found = [Case(given=row["input"], expected=row["output"]) for row in rows]
    return found, next((name for name in names if name), "")


def _name(value: JsonValue, key: str = "") -> str:
    inner = value.get(key) if key and isinstance(value, dict) else value
    return inner if isinstance(inner, str) and inner.isidentifier() else ""


def _parsed(value: JsonValue) -> JsonValue:
    return cast(JsonValue, json.loads(value)) if isinstance(value, str) else value


def _unpacked(value: JsonValue) -> JsonValue:
    """Return private tests: JSON, or JSON text that was pickled, compressed and written in base64.

    The pickle may hold text and nothing else: a table must not be able to run code here.
    """
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
        return _parsed(value)
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"private_test_cases are neither JSON nor base64: {error}") from None
    opened = zlib.decompressobj()
    data = opened.decompress(raw, _MAX_UNPACKED)
    if opened.unconsumed_tail:
        raise ValueError(f"private_test_cases are larger than {_MAX_UNPACKED} bytes")
    try:
        text = cast(object, _TextOnly(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, EOFError, IndexError) as error:
        raise ValueError(f"private_test_cases: {error}") from None
    if not isinstance(text, str):
        raise TypeError(f"private_test_cases hold {type(text).__name__}, and not text")
    return _parsed(text)


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"they hold {module}.{name}, and not text alone")


def _value(text: str) -> JsonValue:
    """Return the JSON value or Python literal in `text`, else the text itself."""
    try:
        return cast(JsonValue, json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return cast(JsonValue, json.loads(json.dumps(ast.literal_eval(text.strip()))))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _lines(value: JsonValue) -> str:
    if isinstance(value, list):
        return "\n".join(_lines(one) for one in value)
    return value if isinstance(value, str) else json.dumps(value)
