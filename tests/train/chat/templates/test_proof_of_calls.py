"""What stands beside calls and results: the system message, a text, and what is said later."""

from dataclasses import replace

import pytest
from tests.train.chat.templates.families import BY_NAME, hermes
from tests.train.chat.templates.newer_families import ALL_BY_NAME
from tests.train.chat.templates.play import ADD_THEM, TOOLS
from tests.train.chat.templates.test_proof import ASKED, ids_of, said_and_next

from telescope_core.errors import TemplateLossError
from telescope_core.types import Message
from telescope_train.chat.probe import probe_template

MISTRAL = ALL_BY_NAME["Mistral v3"]
SYSTEM = Message(role="system", content="Add.")


def test_a_system_message_that_is_lost_behind_a_call_is_refused_with_tools_alone():
    renderer = MISTRAL.renderer()
    assert renderer.prompt((SYSTEM, *ASKED))
    assert renderer.prompt(ASKED, tools=TOOLS)
    said = r"leaves out the system message once a call has its result; .* what the user says"
    with pytest.raises(TemplateLossError, match=said):
        renderer.prompt((SYSTEM, *ASKED), tools=TOOLS)
    assert (
        "refused where a run needs it: system messages with tools" in probe_template(renderer).text
    )


@pytest.mark.parametrize(
    ("shown", "messages", "tools", "lost"),
    [
        ("messages | length < 3", ["a", "b"], (), "once the conversation goes on"),
        ("not tools", ["a"], TOOLS, "where tools are offered"),
        ("messages | length < 5", ["a"], TOOLS, "behind calls"),
    ],
)
def test_a_system_message_is_looked_for_wherever_it_may_get_lost(shown, messages, tools, lost):
    source = BY_NAME["Qwen2.5"].source()
    text = source.replace("messages[0].content", f"(messages[0].content if {shown} else '')")
    assert text != source
    model = replace(BY_NAME["Qwen2.5"], name=f"system if {shown}", text=text)
    told = [Message(role="user", content=messages[0])]
    for content in messages[1:]:
        told += [Message(role="assistant", content="4"), Message(role="user", content=content)]
    renderer = model.renderer()
    assert renderer.prompt(told, tools=tools)
    with pytest.raises(TemplateLossError, match=f"leaves out the system message {lost}"):
        renderer.prompt([SYSTEM, *told], tools=tools)


def beside(text: str) -> str:
    """What Hermes writes as a call with a text beside it."""
    return text + hermes(ADD_THEM, "") + "<|im_end|>"


QUIET = replace(
    BY_NAME["Qwen2.5"],
    name="no text beside calls",
    text=BY_NAME["Qwen2.5"].source().replace(
        "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}", ""
    ),
)  # fmt: skip


def test_a_text_beside_a_call_that_later_prompts_leave_out_is_a_sample_of_its_own():
    assert QUIET.text != BY_NAME["Qwen2.5"].source()
    renderer = QUIET.renderer()
    ids = ids_of(QUIET, beside("I add them.\n"))
    said, after = said_and_next(renderer, ids, "4.5", TOOLS)
    assert (said.content, len(said.tool_calls)) == ("I add them.", 1)
    # What was sampled stays in its own chain, and the next prompt is all the template's.
    assert list(after.token_ids) == renderer.encode(after.text)
    assert "I add them." not in after.text
    assert '"add"' in after.text
    report = probe_template(renderer)
    assert report.keeps_text_with_calls is False
    assert "later turns leave out the text beside a call, so that such a turn" in report.text
    assert "text beside a call" not in report.refused


def test_a_call_that_is_lost_beside_a_text_is_refused_when_it_happens():
    text = BY_NAME["Qwen2.5"].source().replace(
        "for call in message.tool_calls", "for call in message.tool_calls if not message.content"
    )  # fmt: skip
    model = replace(BY_NAME["Qwen2.5"], name="text or call", text=text)
    renderer = model.renderer()
    assert said_and_next(renderer, ids_of(model, beside("")), "4.5", TOOLS)[1].token_ids
    with pytest.raises(TemplateLossError, match=r"stands beside a call, .* leaves out"):
        said_and_next(renderer, ids_of(model, beside("I add them.\n")), "4.5", TOOLS)


def test_calls_that_are_lost_once_the_conversation_goes_on_are_refused_with_tools():
    text = BY_NAME["Qwen2.5"].source().replace(
        "for call in message.tool_calls",
        "for call in message.tool_calls if messages[-1].role == 'tool'",
    )  # fmt: skip
    model = replace(BY_NAME["Qwen2.5"], name="forgets calls", text=text)
    renderer = model.renderer()
    with pytest.raises(TemplateLossError, match=r"\bcalls\b"):
        renderer.prompt(ASKED, tools=TOOLS)
    assert renderer.prompt(ASKED).token_ids
