"""What a template loses is refused by name, where it is needed and nowhere else."""

from dataclasses import replace

import pytest
from tests.train.chat.templates.families import BY_NAME, CHATML_MARKS, Family, chatml
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.play import ADD_THEM, SCENARIOS, TOOLS, play
from tests.train.chat.templates.tokenizers_made_here import FIXTURES

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.types import Message, ToolCall
from telescope_train.chat.conversations import Conversations
from telescope_train.chat.probe import probe_template
from telescope_train.chat.proof import Use
from telescope_train.chat.renderer import Renderer, load_renderer
from telescope_train.chat.supervised import end_note, render_conversations
from telescope_train.config.schema import ModelSection

ASKED = (Message(role="user", content="2+2="),)
CHATML = BY_NAME["SmolLM (ChatML)"]
EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def family(name: str, text: str, **changes) -> Family:
    """A family of ChatML's tokens with the template `text`."""
    return replace(CHATML, name=name, text=text, **changes)


def ids_of(model: Family, text: str) -> tuple[int, ...]:
    return tuple(model.continue_with(text))


def said_and_next(renderer: Renderer, ids: tuple[int, ...], then: str, tools=()) -> tuple:
    """What is read of `ids`, and the prompt after the caller's next messages."""
    prompt = renderer.prompt(ASKED, tools=tools)
    said = renderer.parse(ids, tools=tools, prompt=prompt)
    more = [
        Message(role="tool", content=then, tool_call_id=call.id) for call in said.tool_calls
    ] or [Message(role="user", content=then)]
    conversations = Conversations(renderer)
    tokens = sampled_tokens(prompt.token_ids, ids, [-1.0] * len(ids))
    conversations.add(prompt, said, tokens, tools=tools)
    return said, conversations.prompt_for([*ASKED, said, *more], tools=tools)


@pytest.mark.parametrize("model", ALL_FAMILIES, ids=lambda one: one.name)
def test_nothing_is_refused_that_a_family_is_used_for(model):
    renderer = model.renderer()
    assert renderer.refusal(Use.ANSWERS) is None
    assert renderer.refusal(Use.TURNS) is None
    assert renderer.refusal(Use.THINKING) is None
    if "tools" in model.chains or "thinking tools" in model.chains:
        assert renderer.refusal(Use.TOOLS) is None


PLAIN_TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_the_token_that_ends_turns_and_is_no_end_of_the_model_is_named():
    # As in base models: turns end with <|im_end|>, and eos_token_id is another token.
    tokenizer = CHATML.tokenizer()
    other, own = (tokenizer.convert_tokens_to_ids(one) for one in ("<|im_start|>", "<|im_end|>"))
    reason = Renderer(tokenizer, stop_token_ids=[other]).refusal(Use.ANSWERS)
    assert reason is not None
    assert f"'<|im_end|>' (token {own})" in reason
    assert f"'<|im_start|>', token {other}" in reason
    assert f"add {own} to eos_token_id in generation_config.json" in reason
    assert "parser" not in reason
    assert Renderer(tokenizer, stop_token_ids=[other, own]).refusal(Use.ANSWERS) is None


def test_a_template_without_an_end_token_is_told_and_not_refused():
    model = family("no end", PLAIN_TURNS)
    renderer = model.renderer()
    assert renderer.refusal(Use.ANSWERS) is None
    report = probe_template(renderer)
    assert report.no_end is not None
    assert "does not learn to stop" in report.text
    assert repr("\n") in report.no_end
    assert "'<|im_end|>'" in report.no_end
    prompt = renderer.prompt(ASKED)
    assert renderer.parse(ids_of(model, "It is 4."), prompt=prompt).content == "It is 4."


def test_supervised_training_is_told_how_answers_end():
    tokenizer = CHATML.tokenizer()
    own = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_note(tokenizer, end_ids=[own]) is None
    note = end_note(family("no end", PLAIN_TURNS).tokenizer(), end_ids=[own])
    assert note is not None
    assert "does not learn to stop" in note
    unended = family("other end", CHATML.source().replace("<|im_end|>", "<|im_start|>"))
    with pytest.raises(ConfigError, match=r"add \d+ to eos_token_id"):
        end_note(unended.tokenizer(), end_ids=[own])


def test_a_template_that_takes_parts_shows_what_the_user_says():
    model = ALL_BY_NAME["SmolVLM, LLaVA-Next (text parts)"]
    played = play(model, SCENARIOS["multi"])
    assert "2+2=" in played.prompts[0].text
    assert "Six,\n\nThe answer is 4." in played.prompts[2].text
    ((sample,),) = render_conversations(model.tokenizer(), [played.messages])
    assert "2+2=" in model.tokenizer().decode(sample.token_ids)


def test_a_template_that_leaves_out_the_user_is_refused_before_the_run(tiny, tmp_path):
    template = tmp_path / "silent.jinja"
    template.write_text(
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    settings = ModelSection(model=str(tiny), chat_template=str(template))
    with pytest.raises(ConfigError, match=r"\buser\b.*chat_template"):
        load_renderer(settings)
    template.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    assert load_renderer(settings).prompt(ASKED).token_ids


def test_answers_in_channels_that_no_parser_knows_are_refused_before_the_run():
    model = family(
        "channels",
        EACH + "{% if m.role == 'assistant' %}<|part|>answer<|is|>{% endif %}{{ m.content }}"
        "<|im_end|>{% endfor %}" + PROMPT,
        special=[*CHATML_MARKS, "<|part|>", "<|is|>"],
    )
    renderer = model.renderer()
    with pytest.raises(ConfigError, match=r"'<\|part\|>answer<\|is\|>Nothing.*'answerNoth"):
        renderer.require(Use.ANSWERS)
    with pytest.raises(ConfigError, match=r"<\|part\|>"):
        renderer.prompt(ASKED)
    assert renderer.refusal(Use.ANSWERS) is not None


def test_a_generation_prompt_that_history_does_not_show_is_refused():
    model = family("begun", EACH + "{{ m.content }}<|im_end|>{% endfor %}" + PROMPT.replace(
        "assistant\n", "assistant\nIn short: "))  # fmt: skip
    renderer = model.renderer()
    with pytest.raises(ConfigError, match=r"In short: '"):
        renderer.require(Use.ANSWERS)
    assert renderer.refusal(Use.ANSWERS) is not None


GRANITE = ALL_BY_NAME["Granite 3.3"]
FALCON = family(
    "Falcon-H1", (FIXTURES / "falcon_h1.jinja").read_text(), plain=["<tool_call>", "</tool_call>"]
)


@pytest.mark.parametrize(
    ("model", "lost"),
    [(GRANITE, "leaves out calls of earlier turns"), (FALCON, "leaves out results of calls")],
    ids=lambda one: getattr(one, "name", ""),
)
def test_calls_or_results_that_history_loses_are_refused_with_tools_alone(model, lost):
    renderer = model.renderer()
    assert play(model, SCENARIOS["multi"], renderer=renderer).prompts
    with pytest.raises(ConfigError, match=f"{lost}; let the environment describe its"):
        renderer.prompt(ASKED, tools=TOOLS)
    report = probe_template(renderer)
    assert lost in report.row()["refused"]["tools"]
    assert "refused where a run needs it: tools (run.json says why)" in report.text


def test_a_template_that_fails_on_tools_is_refused_with_tools_alone():
    model = family(
        "Command R+",
        "{% if tools %}{{ tools[0].no_such.key }}{% endif %}"
        + EACH + "{{ m.content }}<tool_call></tool_call><|im_end|>{% endfor %}" + PROMPT,
    )  # fmt: skip
    report = probe_template(model.renderer(tool_call_parser="hermes"))
    assert "refuses a conversation of user" in report.refused["tools"]
    assert report.keeps_calls is None


def test_a_template_for_tools_alone_is_refused_without_them():
    text = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    model = replace(BY_NAME["Qwen2.5"], name="tools alone", text=text + BY_NAME["Qwen2.5"].source())
    assert play(model, SCENARIOS["tools"]).prompts
    assert probe_template(model.renderer()).keeps_calls
    with pytest.raises(ConfigError, match="refuses a conversation of user: 'NoneType' object"):
        model.renderer().prompt(ASKED)


def test_a_parser_that_does_not_read_the_templates_calls_is_refused():
    renderer = ALL_BY_NAME["Seed-OSS"].renderer(tool_call_parser="minimax_m2")
    assert renderer.prompt(ASKED)
    with pytest.raises(
        ConfigError, match=r"a call is not read by the parser 'minimax_m2'.*<seed:tool_call>"
    ):
        renderer.prompt(ASKED, tools=TOOLS)


def test_two_calls_of_which_one_is_read_are_refused():
    model = family(
        "two",
        "{{ tools | tojson if tools }}" + EACH + "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' if loop.first else ' and then ' }}"
        "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>{% endfor %}" + PROMPT,
    )  # fmt: skip
    renderer = model.renderer(tool_call_parser="mistral")
    with pytest.raises(ConfigError, match=r"\b2 calls.*'mistral'"):
        renderer.prompt(ASKED, tools=TOOLS)
    assert renderer.prompt(ASKED).token_ids


def test_a_second_call_that_history_loses_is_refused_when_it_happens():
    first = (
        BY_NAME["Qwen2.5"].source().replace("in message.tool_calls", "in message.tool_calls[:1]")
    )
    assert first != BY_NAME["Qwen2.5"].source()
    model = replace(BY_NAME["Qwen2.5"], name="first call alone", text=first)
    renderer = model.renderer()
    one = ids_of(model, model.write("", "", ADD_THEM))
    assert said_and_next(renderer, one, "4.5", TOOLS)[1].token_ids
    two = ids_of(model, model.write("", "", ADD_THEM * 2))
    with pytest.raises(ConfigError, match=r"of 2 calls in one turn, .* leaves out calls"):
        said_and_next(renderer, two, "4.5", TOOLS)


def test_calls_in_history_need_no_parser():
    """Examples of calls that an environment writes itself are shown, and nothing is offered."""
    model = replace(BY_NAME["Qwen2.5"], name="shows calls")
    call = ToolCall(id="a", name="add", arguments='{"a": 2}')
    told = [
        *ASKED,
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="4", tool_call_id="a"),
    ]
    assert '"add"' in model.renderer(tool_call_parser="none").prompt(told).text
    with pytest.raises(ConfigError, match="leaves out calls of earlier turns"):
        GRANITE.renderer().prompt(told)


MUSING = family(
    "musing",
    EACH + "{% if m.reasoning_content %}<|muse|>{{ m.reasoning_content }}<|/muse|>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    special=[*CHATML_MARKS, "<|muse|>", "<|/muse|>"],
)


def test_thinking_without_a_mark_is_not_seen_in_every_answer():
    model = family("bare thinking", MUSING.text.replace("<|muse|>", "").replace("<|/muse|>", "\n"))
    renderer = model.renderer()
    assert renderer.refusal(Use.THINKING) is not None
    assert renderer.parse(ids_of(model, "4<|im_end|>")).content == "4"


def test_thinking_that_cannot_be_read_is_refused_when_it_happens():
    renderer = MUSING.renderer()
    assert play(MUSING, SCENARIOS["multi"], renderer=renderer).prompts
    with pytest.raises(ConfigError, match=r"the model thinks, .*'<\|muse\|>.*set reasoning_parser"):
        renderer.parse(ids_of(MUSING, "<|muse|>hm<|/muse|>4<|im_end|>"))
    assert "thinking" in probe_template(renderer).refused


def test_thinking_may_be_left_in_the_answer_on_purpose():
    renderer = MUSING.renderer(reasoning_parser="none")
    said, after = said_and_next(renderer, ids_of(MUSING, "<|muse|>hm<|/muse|>4<|im_end|>"), "3+3=")
    assert said.content == "hm4"
    # Its marks have a meaning in this template, so the turn without them is another turn.
    assert list(after.token_ids) == renderer.encode(after.text)


def test_system_messages_that_a_template_leaves_out_are_refused():
    text = EACH.replace("in messages", "in messages if m.role != 'system'")
    model = family("no system", text + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT)
    assert model.renderer().prompt(ASKED)
    with pytest.raises(ConfigError, match="leaves out the system message"):
        model.renderer().prompt((Message(role="system", content="Add."), *ASKED))


def test_answers_that_a_template_forgets_are_refused_when_a_conversation_goes_on():
    last = (
        "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    model = family("forgets", EACH + last + PROMPT)
    renderer = model.renderer()
    assert renderer.prompt(ASKED).token_ids, "a single turn loses nothing"
    with pytest.raises(ConfigError, match="answer"):
        said_and_next(renderer, ids_of(model, chatml("", "4", ())), "3+3=")


@pytest.mark.parametrize(
    ("name", "written", "own"),
    [
        ("Mistral Small 3.2", '[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{"a": 2}</s>', "abc123XYZ"),
        ("Mistral v3", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "abc123XYZ"}]'
         "</s>", "abc123XYZ"),
        ("Kimi-K2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3"
         '<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|><|tool_calls_section_end|>'
         "<|im_end|>", "functions.add:3"),
    ],
)  # fmt: skip
def test_the_id_that_the_model_wrote_is_the_calls(name, written, own):
    model = ALL_BY_NAME[name]
    said, after = said_and_next(model.renderer(), ids_of(model, written), "4", TOOLS)
    assert [(call.id, call.name) for call in said.tool_calls] == [(own, "add")]
    assert after.text.count(own) == 2


def test_an_id_that_the_template_would_refuse_is_replaced():
    model = ALL_BY_NAME["Mistral Small 3.2"]
    written = '[TOOL_CALLS]add[CALL_ID]no id[ARGS]{"a": 2}</s>'
    said, after = said_and_next(model.renderer(), ids_of(model, written), "4", TOOLS)
    assert "no id" not in after.text
    assert after.text.count(said.tool_calls[0].id) == 2


def test_an_id_that_was_written_twice_names_one_call():
    model = ALL_BY_NAME["Mistral Small 3.2"]
    call = '[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{"a": 2}'
    said, after = said_and_next(model.renderer(), ids_of(model, call * 2 + "</s>"), "4", TOOLS)
    first, second = (one.id for one in said.tool_calls)
    assert first == "abc123XYZ" != second
    # The turn is shown with the other id, so that calls and results agree for the model.
    assert list(after.token_ids) == model.renderer().encode(after.text)


def test_white_space_of_the_template_is_no_part_of_the_answer():
    model = ALL_BY_NAME["Reka-Edge"]
    said, after = said_and_next(model.renderer(), ids_of(model, " 4 \n\n<sep>"), "3+3=")
    assert said.content == "4 "
    assert after.text == "human: 2+2=<sep>assistant: 4 \n\n<sep>human: 3+3=<sep>assistant:"


def test_arguments_are_text_where_the_template_takes_text():
    text = BY_NAME["Qwen2.5"].source()
    joined = text.replace("(call.function.arguments | tojson)", "call.function.arguments")
    assert joined != text
    model = replace(BY_NAME["Qwen2.5"], name="arguments as text", text=joined)
    assert play(model, SCENARIOS["tools"]).prompts
    call = ToolCall(id="a", name="add", arguments='{"a": 2}')
    shown = model.renderer().text(
        [*ASKED, Message(role="assistant", content="", tool_calls=(call,))],
        add_generation_prompt=False,
    )
    assert '{"a": 2}' in shown


ROBOT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|result|>{{ m.content }}<|stop|>"
    "{% else %}<|begin|>{{ 'robot' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not (HEADLESS) %}<|begin|>robot\n{% endif %}"
)


@pytest.mark.parametrize(
    ("headless", "place"),
    [
        ("messages[-1].role == 'tool'", "a result"),
        ("messages | length > 3 and messages[-2].role == 'tool'", "two results"),
        ("messages | length > 3 and messages[-2].role == 'tool' and messages[-1].role == 'user'",
         "a result and what the user says"),
        ("messages | length > 4 and messages[-1].role == 'user'",
         "a result, its answer and what the user says"),
        ("false", ""),
    ],
)  # fmt: skip
def test_a_turn_that_begins_otherwise_behind_calls_is_refused_with_tools(headless, place):
    model = family(
        f"robot {place}",
        ROBOT.replace("HEADLESS", headless),
        special=["<|begin|>", "<|result|>"],
        stops=("<|stop|>",),
    )
    renderer = model.renderer()
    assert renderer.refusal(Use.ANSWERS) is None
    for use in (Use.TOOLS, Use.CALLS):
        reason = renderer.refusal(use)
        assert (f"an answer behind {place}, which" in reason) if place else reason is None


def test_thinking_that_is_written_otherwise_behind_a_result_is_refused_with_tools():
    says = "{{ m.reasoning_content and '<think>' + m.reasoning_content + '</think>' or '' }}"
    behind = says.replace("<think>", "<ponder>").replace("</think>", "</ponder>")
    shown = "{% if loop.previtem and loop.previtem.role == 'tool' %}BEHIND{% else %}SAYS{% endif %}"
    text = ROBOT.replace("HEADLESS", "false").replace("\n{{ m.c", f"\n{shown}{{{{ m.c")
    for name, other in (("alike", says), ("otherwise", behind)):
        model = family(
            f"robot thinks {name}",
            text.replace("BEHIND", other).replace("SAYS", says),
            special=["<|begin|>", "<|result|>"],
            stops=("<|stop|>",),
        )
        renderer = model.renderer()
        assert renderer.refusal(Use.THINKING) is None
        reason = renderer.refusal(Use.CALLS)
        assert reason is None if name == "alike" else "<ponder>" in reason


def test_a_template_with_a_syntax_error_is_told_as_that_with_its_line():
    model = replace(
        BY_NAME["Qwen2.5"], name="broken", text="{# ok #}\n{% for m in messages %}{{ m }}"
    )
    with pytest.raises(ConfigError) as refused:
        probe_template(model.renderer())
    assert "syntax error in line 2, '{% for m in messages" in str(refused.value)
    assert "environment" not in str(refused.value)
