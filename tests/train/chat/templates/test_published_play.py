"""The plays of `make test-templates`, on our own fixtures; and that they notice what is lost."""

import re

import pytest
from tests.train.chat.templates.families import BY_NAME
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.published import outcomes, renderer_for
from tests.train.chat.templates.published_play import PLAYS, play

from telescope_train.chat.renderer import Renderer


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.slow if number % 4 else [], id=one.name)
        for number, one in enumerate(ALL_FAMILIES)
    ],
)
def test_a_play_is_exact_branched_or_refused(family):
    found = outcomes(family.source(), family.arguments)
    assert {one.kind for one in found.values()} <= {"exact", "branched", "refused"}
    assert found["single"].kind == "exact"
    assert found["text and a call"].kind in ("branched", found["tools"].kind)
    if "tools" not in family.chains and "thinking tools" not in family.chains:
        assert found["system tools" if family.takes_system else "tools"].kind == "refused"


class Trusting(Renderer):
    """What would happen without the proof."""

    def refusal(self, use):
        return None


def trusting(template: str) -> Renderer:
    sound = renderer_for(template, {})
    return Trusting(sound.rendering.tokenizer, stop_token_ids=sound.stop_token_ids)


@pytest.mark.parametrize(
    ("name", "change", "scenario", "lost"),
    [
        ("Granite 3.3", ("", ""), "tools", "which nothing refuses"),
        ("Qwen2.5", ("message.content + '\\n</tool_", "'\\n</tool_"), "tools",
         r"not in the prompt: \['platform"),
        ("Qwen2.5", ("<tool_call>", "<call>"), "tools", "written as '<call>"),
        ("Qwen2.5", ("message.content + '<|im_end|>", "'<|im_end|>"), "single",
         r"not in the prompt: \['Is it raining"),
        ("Kimi-K3", ("part('response'", "part('reply'"), "single", "written as"),
        ("Mistral v3", ("", ""), "system tools", r"not in the prompt: \['You sell"),
        ("Qwen2.5", ("in message.tool_calls %", "in message.tool_calls if not message.content %"),
         "text and a call", "which nothing refuses"),
    ],
)  # fmt: skip
def test_what_is_lost_without_a_refusal_is_a_fault(name, change, scenario, lost):
    text = ALL_BY_NAME[name].source()
    assert change[0] in text
    found = play(trusting(text.replace(*change)), PLAYS[scenario])
    assert found.kind == "FAULT"
    assert re.search(lost, found.why)


def test_a_changed_answer_is_a_fault():
    renderer = trusting(BY_NAME["Qwen2.5"].source())
    read = renderer.rendering.read
    renderer.rendering.read = lambda text, prompt, **more: read(text.upper(), prompt, **more)
    found = play(renderer, PLAYS["single"])
    assert found.kind == "FAULT"
    assert "'Not now." in found.why
