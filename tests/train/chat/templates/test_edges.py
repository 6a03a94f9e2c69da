"""What has broken others: spelling, callers that tidy up, cuts, dates, refusals, broken calls."""

import json
import re
from dataclasses import replace
from datetime import datetime
from functools import partial

import pytest
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.play import ADD_THEM, SCENARIOS, THOUGHT, TOOLS, Reply, play
from tests.train.chat.templates.tokenizers_made_here import one_by_one

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError, TemplateLossError, UnknownNameError
from telescope_core.types import Image, Message
from telescope_train.batches.samples import num_cuts_continued, samples_from_rollout
from telescope_train.chat import rendering as rendering_module
from telescope_train.chat.conversations import Conversations

WITH_TOOLS = [
    pytest.param(family, id=family.name) for family in ALL_FAMILIES if "tools" in family.chains
]
THINK_TWICE = [
    pytest.param(family, id=family.name)
    for family in ALL_FAMILIES
    if "thinking tools" in family.chains
]


def respelled(text: str) -> str:
    """Write the arguments in another order, with other spaces and escapes."""
    own = json.dumps(ADD_THEM[0][1], ensure_ascii=False)
    other = dict(reversed(ADD_THEM[0][1].items()))
    return text.replace(own, json.dumps(other, separators=(" ,", ":")))


APPENDS = [
    pytest.param(family, id=family.name)
    for family in ALL_FAMILIES
    if family.chains.get("multi") == 1
]


@pytest.mark.parametrize("family", APPENDS)
@pytest.mark.parametrize("edit", ["changed", "left out"])
def test_answers_that_stay_in_an_edited_history_keep_their_ids(family, edit):
    renderer, tokenizer = family.renderer(), family.tokenizer()
    script = (
        "2+2=",
        Reply(content="4 and"),
        "3+3=",
        Reply(content="six, so"),
        "4+4=",
        Reply(content="8"),
    )
    # One token a character: encoding the text again would give others.
    spelled = partial(family.continue_with, encode=partial(one_by_one, tokenizer))
    played = play(family, script, renderer=renderer, tokenize=spelled)
    start = len(played.messages) - 6
    edited = [*played.messages[: start + 1], *played.messages[start + 3 :]]
    if edit == "changed":
        edited = [*played.messages]
        edited[start] = replace(edited[start], content="1+1=")
    edited.append(Message(role="user", content="and?"))
    prompt = played.conversations.prompt_for(edited)
    # With a turn left out, what was the second answer stands behind the first question.
    kept = played.turns if edit == "changed" else played.turns[1:]
    ids = prompt.token_ids
    for turn in kept:
        assert any(ids[at : at + len(turn)] == turn for at in range(len(ids)))
    text = renderer.text(edited, add_generation_prompt=True)
    assert prompt.text == text
    whole = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert whole(list(ids)) == whole(renderer.encode(text))


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_call_the_template_spells_otherwise_keeps_its_ids(family):
    spoken = play(family, SCENARIOS["tools"], spell=respelled)
    first = spoken.prompts[0].token_ids + spoken.turns[0]
    is_kept = spoken.prompts[1].token_ids[: len(first)] == first
    plainly = play(family, SCENARIOS["tools"])
    before = plainly.prompts[0].token_ids + plainly.turns[0]
    assert is_kept == (plainly.prompts[1].token_ids[: len(before)] == before)
    if is_kept and not family.shows_ids:
        after = plainly.prompts[1].token_ids[len(before) :]
        assert spoken.prompts[1].token_ids[len(first) :] == after


def tidied(message: Message) -> Message:
    """As a caller sends it that reads and writes JSON in another language."""
    calls = [
        replace(call, arguments=json.dumps(json.loads(call.arguments), sort_keys=True, indent=1))
        for call in message.tool_calls
    ]
    return replace(message, content=message.content.strip(), tool_calls=tuple(calls))


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_caller_that_tidies_up_finds_its_chain(family):
    script = SCENARIOS["tools"]
    assert play(family, script, send_back=tidied).prompts == play(family, script).prompts


@pytest.mark.parametrize("family", THINK_TWICE)
def test_a_caller_that_drops_the_thinking_gets_what_the_template_makes_of_that(family):
    dropped = play(
        family, SCENARIOS["thinking tools"], send_back=lambda said: replace(said, reasoning="")
    )
    for prompt in dropped.prompts:
        assert THOUGHT not in prompt.text
        assert prompt.token_ids == tuple(family.renderer().encode(prompt.text))


@pytest.mark.parametrize("family", [ALL_BY_NAME["SmolLM (ChatML)"], ALL_BY_NAME["Gemma 3"]])
def test_half_a_character_at_a_stop_stays_as_it_was_sampled(family):
    split = partial(one_by_one, family.tokenizer())
    script = ("hi", Reply(content="so \U0001f600", lost=3), "go on", Reply(content="ok"))
    played = play(family, script, tokenize=partial(family.continue_with, encode=split))
    first = played.prompts[0].token_ids + played.turns[0]
    assert played.messages[-3].content.startswith("so ")
    assert "\ufffd" in played.messages[-3].content
    assert played.prompts[1].token_ids[: len(first)] == first
    assert played.prompts[1].num_ends_added == 1


def test_one_more_end_is_counted_for_each_turn_that_was_cut():
    cut = Reply(content="Nobody knows", lost=4)
    played = play(ALL_BY_NAME["Qwen2.5"], ("a", cut, "b", Reply(content="4"), "c", cut, "d", cut))
    assert [prompt.num_ends_added for prompt in played.prompts] == [0, 1, 1, 2]
    assert num_cuts_continued([played.rollout]) == 2
    samples = samples_from_rollout(played.rollout, 1.0, 1.0)
    assert sum(int(sample.mask.sum()) for sample in samples) == sum(map(len, played.turns))


def test_an_answer_that_ends_with_another_end_than_the_templates_branches():
    family = ALL_BY_NAME["Qwen2.5"]
    played = play(
        family, SCENARIOS["multi"], spell=lambda text: text.replace("<|im_end|>", "<|endoftext|>")
    )
    assert "<|endoftext|>" not in played.prompts[-1].text
    for prompt in played.prompts:
        assert prompt.token_ids == tuple(family.renderer().encode(prompt.text))


def test_an_empty_think_block_that_the_template_inserts_is_not_put_into_the_chain():
    """Qwen3 shows one in front of the last turn only: what the model wrote was without."""
    played = play(ALL_BY_NAME["Qwen3, thinking"], SCENARIOS["multi"])
    assert "<think>" not in played.prompts[-1].text
    answer = Message(role="assistant", content="4")
    whole = (
        ALL_BY_NAME["Qwen3, thinking"]
        .renderer()
        .text((*played.prompts[0].messages, answer), add_generation_prompt=False)
    )
    assert "<think>\n\n</think>" in whole


def test_a_date_in_the_header_stays_that_of_the_beginning(monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, 6)

    monkeypatch.setattr(rendering_module, "datetime", Clock)
    family = ALL_BY_NAME["Llama 3.2"]
    renderer = family.renderer()
    monkeypatch.undo()
    played = play(family, SCENARIOS["multi"], renderer=renderer)
    dates = [re.findall(r"Today Date: (\d\d \w+ \d{4})", prompt.text) for prompt in played.prompts]
    assert dates == [["06 May 2031"]] * len(played.prompts)


def test_a_conversation_that_the_template_refuses_is_named():
    twice = [Message(role="user", content="a"), Message(role="user", content="b")]
    renderer = ALL_BY_NAME["Gemma 3"].renderer()
    with pytest.raises(ConfigError, match=r"user, user.*alternate"):
        renderer.prompt(twice)
    assert renderer.prompt(twice[1:]).token_ids
    system = [Message(role="system", content="a"), twice[0]]
    renderer = ALL_BY_NAME["Gemma 2"].renderer()
    with pytest.raises(ConfigError, match=r"system, user"):
        renderer.prompt(system)
    assert renderer.prompt(system[1:]).token_ids


def test_tools_that_the_template_leaves_out_are_refused():
    asked = [Message(role="user", content="a")]
    unread = ALL_BY_NAME["Gemma 3"].renderer()
    with pytest.raises(ConfigError, match="tool_call_parser"):
        unread.prompt(asked, tools=TOOLS)
    silent = ALL_BY_NAME["Phi-4"].renderer(tool_call_parser="hermes")
    with pytest.raises(ConfigError):
        silent.prompt(asked, tools=TOOLS)
    for renderer in (unread, silent):
        assert renderer.prompt(asked).token_ids, "without tools there is nothing to lose"


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_parsers_can_be_named(setting):
    with pytest.raises(UnknownNameError, match=f"unknown {setting} 'thinks'"):
        ALL_BY_NAME["Qwen2.5"].renderer(**{setting: "thinks"})
    ids = ALL_BY_NAME["Qwen2.5"].continue_with("<think>\nhm\n</think>\n\n4<|im_end|>")
    thinking = ALL_BY_NAME["Qwen2.5"].renderer(reasoning_parser="think").parse(ids)
    assert (thinking.reasoning, thinking.content) == ("hm", "4")
    assert ALL_BY_NAME["Qwen2.5"].renderer().parse(ids).content == "<think>\nhm\n</think>\n\n4"


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_broken_arguments_come_back_to_the_model_and_the_rollout_goes_on(family):
    """The tool refuses them; the template shows them in one way or another."""

    def broken(text: str) -> str:
        return re.sub(r"\}(?=[^{}]*$)", ",", re.sub("null|None", "nil", text), count=0)

    renderer = family.renderer()
    asked = (Message(role="user", content="2+2="),)
    first = renderer.prompt(asked, tools=TOOLS)
    ids = tuple(family.continue_with(broken(family.write("", "", ADD_THEM))))
    said = renderer.parse(ids, tools=TOOLS, prompt=first)
    answers = [
        Message(role="tool", content="error: no JSON", tool_call_id=call.id)
        for call in said.tool_calls
    ] or [Message(role="user", content="that is no call")]
    conversations = Conversations(renderer)
    tokens = sampled_tokens(first.token_ids, ids, [-1.0] * len(ids))
    conversations.add(first, said, tokens, tools=TOOLS)
    prompt = conversations.prompt_for([*asked, said, *answers], tools=TOOLS)
    kept = (*first.token_ids, *ids)
    is_kept = prompt.token_ids[: len(kept)] == kept
    assert is_kept or prompt.token_ids == tuple(renderer.encode(prompt.text))
    assert "nil" in prompt.text


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_ids_of_calls_differ_from_turn_to_turn(family):
    call = Reply(calls=ADD_THEM)
    played = play(family, ("a", call, "tool:4", call, "tool:4", call))
    found = [call.id for message in played.messages for call in message.tool_calls]
    assert len(set(found)) == len(found) == 3
    writes_ids = family.name in ("Kimi-K2", "Mistral Small 3.2")
    assert all(re.fullmatch(r"[A-Z2-7]{9}", one) for one in found[writes_ids:])
    assert not writes_ids or found[0] in family.write("", "", ADD_THEM)
    again = play(family, ("a", call, "tool:4", call, "tool:4", call))
    assert again.messages == played.messages


def test_an_id_is_not_used_again_where_a_program_has_shortened_its_history():
    """The same text in as many messages as before, as with a window over the last messages."""
    renderer = ALL_BY_NAME["Qwen2.5"].renderer()
    asked = [Message(role="user", content="a")]
    ids = renderer.encode(ALL_BY_NAME["Qwen2.5"].write("", "", ADD_THEM))

    def answered(messages):
        return renderer.parse(ids, tools=TOOLS, prompt=renderer.prompt(messages, tools=TOOLS))

    first = answered(asked)
    again = answered([first])
    assert again.tool_calls[0].id != first.tool_calls[0].id
    assert answered(asked) == first


def test_encoding_the_text_again_would_be_noticed():
    """The broken version of what is tested here: ids made anew from the text."""
    family = ALL_BY_NAME["Qwen2.5"]
    split = partial(one_by_one, family.tokenizer())
    played = play(family, SCENARIOS["multi"], tokenize=partial(family.continue_with, encode=split))
    anew = tuple(family.renderer().encode(played.prompts[-1].text))
    kept = played.prompts[1].token_ids + played.turns[1]
    assert anew[: len(kept)] != kept == played.prompts[-1].token_ids[: len(kept)]


def test_an_empty_think_block_that_was_sampled_is_no_spelling():
    """Qwen3 takes it out of earlier turns, so the chain ends there."""
    family = ALL_BY_NAME["Qwen3, thinking"]
    played = play(family, SCENARIOS["multi"], spell=lambda text: f"<think>\n\n</think>\n\n{text}")
    for prompt in played.prompts:
        assert prompt.token_ids == tuple(family.renderer().encode(prompt.text))
        assert "<think>" not in prompt.text


def test_a_picture_is_refused_by_name_before_anything_is_rendered():
    renderer = ALL_FAMILIES[0].renderer()
    picture = Image(media_type="image/png", data="iVBORw0KGgo=")
    shown = Message(role="user", content="What is it?", images=(picture,))
    with pytest.raises(TemplateLossError, match=r"\buser\b.*image/png"):
        renderer.prompt([shown])
    first = renderer.prompt([asked := Message(role="user", content="hi")])
    said = Message(role="assistant", content="hello")
    result = Message(role="tool", content="", images=(picture,))
    with pytest.raises(TemplateLossError, match=r"\btool\b.*image/png"):
        renderer.extended(first, [1, 2], [asked, said, result])
    assert renderer.prompt([asked]).token_ids == first.token_ids
