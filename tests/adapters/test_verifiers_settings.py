"""What an environment of verifiers sets for its model, without the package."""

import pytest

from telescope_adapters.verifiers import ModelSettings
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import UnplayableError

NOTHING = {"n": 1, "extra_body": {}, "stop": None, "tool_choice": "auto", "logit_bias": None}


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        (NOTHING, []),
        ({"stop": "</a>"}, ["</a>"]),
        ({"stop": ("</a>", "</b>")}, ["</a>", "</b>"]),
        ({"stop": "</a>", "extra_body": {"stop": ["</b>"]}}, ["</b>"]),
    ],
)
def test_stop_texts_are_those_of_the_request(given, stop):
    assert ModelSettings("sums", NOTHING).stop_of(given) == stop


def test_what_is_not_used_is_named_once():
    said = []
    with showing_troubles(said.append):
        settings = ModelSettings("sums", {"temperature": 0.0, "extra_body": {"top_k": 5}})
        for limit in (8, 8, 9):
            settings.stop_of({"temperature": 0.0, "max_completion_tokens": limit}, max_tokens=8)
    assert [line.rpartition(": ")[2] for line in said] == [
        "temperature, top_k",
        "max_completion_tokens",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"include_stop_str_in_output": True}},
    ],
)
def test_what_allows_other_answers_is_refused(given):
    with pytest.raises(UnplayableError, match=next(iter(given.get("extra_body", given)))):
        ModelSettings("sums", given)
