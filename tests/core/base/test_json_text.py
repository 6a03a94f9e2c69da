"""JSON on a command line is read as its standard defines it."""

import json

import pytest

from telescope_core.base.json_text import read_json


@pytest.mark.parametrize("value", [None, True, 0, -1, 1.5e300, "a", [], {"a": [{"b": None}]}])
def test_what_is_written_as_json_is_read_back(value):
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "the key 'a' twice"),
        ("[NaN]", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("1e999", "1e999 is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        ("{a: 1}", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_what_json_does_not_define_is_an_error(text, reason):
    with pytest.raises(ValueError, match=reason):
        read_json(text)
