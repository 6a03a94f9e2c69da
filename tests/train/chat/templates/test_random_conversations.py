"""Whatever is said, in whatever order: sampled ids stay, and the rest is what is rendered."""

import re
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.play import TOOLS, Reply, play
from tests.train.chat.templates.tokenizers_made_here import one_by_one

from telescope_core.errors import ConfigError
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.formats import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplyFormat

words = st.text(
    st.sampled_from('ab 4.\n{}"\\<|>/[]\u00e9\U0001f600') | st.characters(codec="utf-8"),
    max_size=12,
)
MARKS = (
    "<think> </think> <tool_call> </tool_call> [TOOL_CALLS] <|call|> <|im_end|> functools[ "
    '<function=f> {"name":"add","arguments":{}}'
)
marked = st.lists(words | st.sampled_from(MARKS.split()), max_size=5).map("".join)
arguments = st.dictionaries(
    words, st.integers(-9, 9) | words | st.none() | st.lists(st.booleans(), max_size=2), max_size=3
)


@cache
def parts(name: str):
    family = ALL_BY_NAME[name]
    return family, family.renderer(), family.tokenizer()


@st.composite
def scripts(draw):
    family = draw(st.sampled_from(ALL_FAMILIES))
    thinks = "thinking" in family.chains and ("multi" not in family.chains or draw(st.booleans()))
    script: list[Reply | str] = []
    for _ in range(draw(st.integers(1, 3))):
        script.append(draw(marked))
        thought = draw(words) if thinks else ""
        if "tools" in family.chains and draw(st.booleans()):
            script += [
                Reply(calls=(("add", draw(arguments)),), thinking=thought),
                "tool:" + draw(words),
            ]
        script.append(
            Reply(content=draw(marked), thinking=thought, lost=draw(st.sampled_from([0, 0, 1, 3])))
        )
    return family.name, script


@pytest.mark.slow
@settings(max_examples=50)
@given(scripts(), st.booleans())
def test_sampled_ids_stay_and_the_rest_is_what_is_rendered(case, is_odd):
    name, script = case
    family, renderer, tokenizer = parts(name)
    encode = partial(one_by_one, tokenizer) if is_odd else None
    try:
        played = play(
            family, script, renderer=renderer, tokenize=partial(family.continue_with, encode=encode)
        )
    except ConfigError as error:
        refusal = str(error)
    else:
        check(played, tokenizer)
        return
    assert re.search(r"template.*refuses", refusal), (name, script)


def check(played, tokenizer):
    samples = samples_from_rollout(played.rollout, 1.0, 1.0)
    trained = sorted(token for one in samples for token in one.token_ids[one.mask].tolist())
    assert trained == sorted(token for turn in played.turns for token in turn)
    for number, prompt in enumerate(played.prompts):
        kept = max(
            (
                len(before.token_ids) + len(turn)
                for before, turn in zip(played.prompts[:number], played.turns, strict=False)
                if prompt.token_ids[: len(before.token_ids) + len(turn)] == before.token_ids + turn
            ),
            default=0,
        )
        rendered = tuple(tokenizer.encode(prompt.text, add_special_tokens=False))
        added = prompt.token_ids[kept:]
        decode = partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if kept:
            assert decode(rendered).endswith(decode(list(added)).lstrip())
        else:
            assert prompt.token_ids == rendered


@settings(max_examples=120)
@given(
    marked, st.sampled_from(sorted(TOOL_CALL_PARSERS)), st.sampled_from(sorted(REASONING_PARSERS))
)
def test_no_text_breaks_a_parser_and_no_word_is_lost(text, tool_calls, reasoning):
    form = ReplyFormat(
        tool_calls=TOOL_CALL_PARSERS[tool_calls], reasoning=REASONING_PARSERS[reasoning]
    )
    reply = form.parse(text, tools=TOOLS)
    found = (
        reply.content
        + reply.reasoning
        + "".join(f"{one.name}{one.arguments}" for one in reply.calls)
    )
    assert {letter for letter in text if letter.isalnum()} <= set(
        found + "".join(form.marks)
    ) | set("functionsnameargumentsparameterstool_calljson")
    assert all(call.name for call in reply.calls)
