"""How a chat endpoint is told to read tool calls, by the chat template."""

import pytest

from telescope_train.chat.formats import choose_format
from telescope_train.chat.template import read_chat_template
from telescope_train.inference.server import _NAME_THERE, tool_call_arguments


def test_a_template_with_tools_that_is_known_is_read():
    shipped = read_chat_template("chatml-keeps-thinking")
    *options, parser = tool_call_arguments(shipped)
    assert options == ["--enable-auto-tool-choice", "--tool-call-parser"]
    assert parser == "hermes"


@pytest.mark.parametrize("template", ["", "{{ messages[0].content }}", "{{ tools }}"])
def test_a_template_without_tools_or_unknown_leaves_requests_with_tools_refused(template):
    assert tool_call_arguments(template) == ()


@pytest.mark.slow
def test_the_names_are_those_of_both_sides():
    parsers = pytest.importorskip("vllm.tool_parsers").ToolParserManager
    for here, there in _NAME_THERE.items():
        assert choose_format("", tool_call_parser=here).tool_calls.name == here
        assert there in {*parsers.tool_parsers, *parsers.lazy_parsers}, there
