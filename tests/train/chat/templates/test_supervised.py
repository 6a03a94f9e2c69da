"""Learning from conversations: each turn once, behind what the template shows before it."""

from copy import copy
from datetime import datetime

import pytest
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.play import SCENARIOS, play

from telescope_core.errors import ConfigError
from telescope_core.types import Message, ToolCall
from telescope_train.chat.supervised import render_conversations
from telescope_train.chat.template import read_chat_template

REFUSED = (
    "DeepSeek-R1",
    "DeepSeek-V3.1, thinking = true",
    "Qwen3, enable_thinking = false",
    "Mistral v3, system message",
    "Gemma 4",
    "Gemma 4, enable_thinking = true",
    "Apriel 1.6",
)
"""What is asked stands otherwise in these templates once it is answered. Arguments of a template
are no setting of supervised training."""
CASES = [
    pytest.param(family, scenario, id=f"{family.name}: {scenario}")
    for family in ALL_FAMILIES
    for scenario in family.chains
    if scenario in ("multi", "thinking") and family.name not in REFUSED
]


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_each_turn_is_learnt_once_as_it_is_sampled(family, scenario):
    """What is learnt are the tokens that a policy that wrote the conversation would sample."""
    played = play(family, SCENARIOS[scenario])
    tokenizer = family.tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(family.stops))
    (samples,) = render_conversations(tokenizer, [played.messages], end_ids=ends)
    learnt = [token for one in samples for token in one.token_ids[one.mask].tolist()]
    empty = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    if family.name == "Qwen3, thinking" and scenario == "multi":
        assert learnt == [token for turn in played.turns for token in (*empty, *turn)]
        return
    if family.name == "GLM-4.5":
        assert learnt == [token for turn in played.turns for token in turn[:-1]]
        return
    assert learnt == [token for turn in played.turns for token in turn]
    for sample, prompt in zip(samples, played.prompts, strict=False):
        start = sample.mask.argmax()
        if len(samples) > 1:
            assert tuple(sample.token_ids[:start]) == prompt.token_ids
    if len(samples) == 1:
        whole = played.prompts[-1].token_ids + played.turns[-1]
        assert tuple(samples[0].token_ids) == whole
    assert len(samples) == family.chains[scenario]


def test_a_turn_is_encoded_by_itself_as_it_is_sampled():
    """Together with the newline of the generation prompt it begins with another token."""
    family = ALL_BY_NAME["Qwen2.5"]
    said = Message(role="assistant", content="<tool is 4")
    tokenizer = family.tokenizer()
    ((sample,),) = render_conversations(tokenizer, [[Message(role="user", content="a"), said]])
    learnt = sample.token_ids[sample.mask].tolist()
    assert learnt == family.continue_with("<tool is 4<|im_end|>")
    text = tokenizer.decode(sample.token_ids, clean_up_tokenization_spaces=False)
    assert tokenizer.encode(text, add_special_tokens=False) != sample.token_ids.tolist()


def test_calls_and_thinking_are_learnt_as_the_template_writes_them():
    family = ALL_BY_NAME["Command R7B"]
    call = ToolCall(id="A", name="add", arguments='{"a": 2}')
    messages = [
        Message(role="user", content="a"),
        Message(role="assistant", content="", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", content="4", tool_call_id="A"),
        Message(role="assistant", content="4"),
    ]
    ((sample,),) = render_conversations(family.tokenizer(), [messages])
    learnt = family.tokenizer().decode(sample.token_ids[sample.mask])
    assert learnt == family.write("hm", "", (("add", {"a": 2}),)) + family.write("", "4", ())


def test_a_template_that_cannot_show_its_own_thinking_is_refused():
    messages = [Message(role="user", content="a"), Message(role="assistant", content="4")]
    with pytest.raises(ConfigError, match="generation prompt"):
        render_conversations(ALL_BY_NAME["DeepSeek-R1"].tokenizer(), [messages])
    ((sample,),) = render_conversations(ALL_BY_NAME["Qwen2.5"].tokenizer(), [messages])
    assert sample.mask.any()


def test_the_clock_of_a_template_is_stopped():
    """Else a training could not be resumed on another day with the same tokens."""
    messages = [Message(role="user", content="a"), Message(role="assistant", content="4")]
    tokenizer = ALL_BY_NAME["Llama 3.2"].tokenizer()
    ((sample,),) = render_conversations(tokenizer, [messages], moment=datetime(2019, 11, 30))
    assert "Today Date: 30 Nov 2019" in tokenizer.decode(sample.token_ids)
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("%d %b %Y", "%f")
    first, second = render_conversations(tokenizer, [messages] * 2)
    assert first[0].token_ids.tolist() == second[0].token_ids.tolist()


def test_answers_that_follow_each_other_are_refused_by_name_where_they_cannot_be_learned():
    asked, said = Message(role="user", content="a"), Message(role="assistant", content="4")
    chats, names = [[asked, said], [asked, said, asked, said, said]], ["row 1", "row 2"]
    tokenizer = ALL_BY_NAME["Qwen3, thinking"].tokenizer()
    fact = r"^row 2: messages 3 and 4 are two assistant messages.*join them"
    with pytest.raises(ConfigError, match=fact):
        render_conversations(tokenizer, chats, labels=names)
    assert render_conversations(ALL_BY_NAME["Qwen2.5"].tokenizer(), chats, labels=names)


def test_a_template_that_does_not_continue_its_prompt_is_told_with_the_row_and_the_place():
    messages = [Message(role="user", content="a" * 999), Message(role="assistant", content="4")]
    tokenizer = ALL_BY_NAME["DeepSeek-R1"].tokenizer()
    with pytest.raises(ConfigError, match=r"^row 1: .*generation prompt: .*<think>") as caught:
        render_conversations(tokenizer, [messages], labels=["row 1"])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "said",
    [
        Message(role="assistant", content="a<|im_end|>b rest"),
        Message(role="assistant", content="ends twice<|im_end|>"),
        Message(role="assistant", content="4", reasoning="hm<|im_end|>"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="A", name="add", arguments='{"a": "\\u003c|im_end|>"}'),),
        ),
    ],
    ids=["content", "trailing", "reasoning", "arguments"],
)
def test_a_turn_with_the_text_of_an_end_token_is_refused_by_name(said):
    """The model could not write what stands behind it."""
    asked = Message(role="user", content="a<|im_end|>")
    fine = Message(role="assistant", content="4")
    tokenizer = ALL_BY_NAME["Qwen3, thinking"].tokenizer()
    chats = [[asked, fine], [asked, said, asked, fine]]
    with pytest.raises(ConfigError, match=r"row 2: message 1 has '<\|im_end\|>'"):
        render_conversations(tokenizer, chats, labels=["row 1", "row 2"])
    ((sample,),) = render_conversations(tokenizer, chats[:1])
    assert tokenizer.decode(sample.token_ids[sample.mask]).endswith("4<|im_end|>")


@pytest.mark.parametrize("said", [{"reasoning": "one and one"}, {"content": "<think>a b</think>4"}])
@pytest.mark.parametrize("content", ["4", ""])
def test_thinking_that_the_template_leaves_out_is_refused_by_name(said, content):
    """Also in a turn that is not the last one; it is no loss where the turn is not learned."""
    tokenizer = copy(ALL_BY_NAME["Qwen2.5"].tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content.split('</think>')[-1]"
    )
    asked, fine = Message(role="user", content="a"), Message(role="assistant", content="4")
    thought = Message(role="assistant", **{"content": content, **said})
    chat = [asked, thought, asked, fine]
    with pytest.raises(ConfigError, match=r"row 1: .* leaves out the thinking of message 1.*keeps"):
        render_conversations(tokenizer, [chat], labels=["row 1"])
    assert render_conversations(tokenizer, [chat], learnt=[[3]])
    tokenizer.chat_template = read_chat_template("chatml-keeps-thinking")
    ((sample,),) = render_conversations(tokenizer, [chat])
    kept = thought.reasoning or "a b"
    assert kept in tokenizer.decode(sample.token_ids[sample.mask])


def test_text_that_the_template_leaves_out_is_refused():
    tokenizer = copy(ALL_BY_NAME["Qwen2.5"].tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content.split('##')[-1]"
    )
    asked = Message(role="user", content="a")
    said = Message(role="assistant", content="steps ## 4")
    with pytest.raises(ConfigError, match="leaves out the text of message 1"):
        render_conversations(tokenizer, [[asked, said]])


@pytest.mark.parametrize("name", ["Mistral v3", "Gemma 3"])
def test_a_conversation_that_the_template_refuses_is_named(name):
    tokenizer = ALL_BY_NAME[name].tokenizer()
    fine = [Message(role="user", content="a"), Message(role="assistant", content="4")]
    chats = [fine, [fine[0], *fine]]
    with pytest.raises(ConfigError, match=r"row 2: .* refuses a conversation of user, user"):
        render_conversations(tokenizer, chats, labels=["row 1", "row 2"])
    assert render_conversations(tokenizer, chats[:1])
