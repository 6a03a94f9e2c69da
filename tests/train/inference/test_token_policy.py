"""Prompts reuse the sampled ids exactly, and start anew where a template rewrites history."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from telescope_core import ConfigError
from telescope_core.base.chains import chains_of, sampled_tokens
from telescope_core.errors import EndpointError, TemplateLossError
from telescope_core.types import JsonValue, Message, Sampling
from telescope_train.chat.conversations import Conversations
from telescope_train.chat.renderer import Prompt, Renderer
from telescope_train.inference.client import parse_reply, parse_version
from telescope_train.inference.generation import Generation, Request, Span, joined
from telescope_train.inference.policy import TokenPolicy, TokenPolicySource
from telescope_train.inference.wire import TokenReply, VersionSpan
from telescope_train.models.tiny import character_tokenizer

USER = Message(role="user", content="1+1=")
FOLLOW_UP = Message(role="user", content="2+2=")
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS_THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('!')[-1] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def renderer_with(template: str | None = None) -> Renderer:
    tokenizer = character_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(tokenizer, stop_token_ids=[tokenizer.eos_token_id])


def answered(renderer: Renderer, prompt: Prompt, ids: Sequence[int], said: Message):
    """Return the conversations of a rollout with one answer."""
    conversations = Conversations(renderer)
    conversations.add(prompt, said, sampled_tokens(prompt.token_ids, ids, [-1.0] * len(ids)))
    return conversations


class RecordingPool:
    """Answers with scripted tokens and keeps the prompts."""

    is_down = False

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self._answers = list(answers)

    async def generate(self, request: Request) -> Generation:
        self.prompts.append(list(request.prompt_ids))
        self.seeds.append(request.sampling.seed)
        token_ids = tuple(self._answers[len(self.prompts) - 1])
        ended = token_ids[-1] in request.stop_token_ids
        return Generation(
            token_ids=token_ids,
            logprobs=(-0.5,) * len(token_ids),
            finish_reason="stop" if ended else "length",
            spans=(Span(3, 1), Span(4, len(token_ids) - 1)),
        )


@pytest.mark.parametrize("template", [None, CHATML])
async def test_second_turn_keeps_sampled_ids_and_adds_only_the_templates_text(
    template: str | None,
) -> None:
    renderer = renderer_with(template)
    # Two single characters where the tokenizer would also write two: any other split must survive.
    sampled = [*renderer.encode("2!"), *renderer.stop_token_ids]
    pool = RecordingPool([sampled, sampled])
    policy = TokenPolicy(pool, renderer, "g", None)
    first = await policy.complete([USER], Sampling(max_tokens=8))
    second_messages = [USER, first.message, FOLLOW_UP]
    second = await policy.complete(second_messages, Sampling(max_tokens=8))
    whole = renderer.encode(renderer.text(second_messages, add_generation_prompt=True))
    assert list(pool.prompts[1]) == whole
    assert [*second.prompt_ids[: len(pool.prompts[0]) + 3]] == [*pool.prompts[0], *sampled]
    assert (second.oldest_version, second.newest_version) == (3, 4)


def test_ids_that_the_tokenizer_would_write_otherwise_are_kept() -> None:
    renderer = renderer_with()
    odd = (*renderer.encode("7"), 1, *renderer.stop_token_ids)  # 1 = unknown, which decodes away
    prompt = renderer.prompt([USER])
    said = renderer.parse(odd, prompt=prompt)
    conversations = answered(renderer, prompt, odd, said)
    ids = conversations.prompt_for([USER, said, FOLLOW_UP]).token_ids
    assert ids[: len(prompt.token_ids) + len(odd)] == (*prompt.token_ids, *odd)


async def test_of_two_answers_that_say_the_same_the_later_one_is_continued() -> None:
    renderer = renderer_with()
    odd = [*renderer.encode("7"), 1, *renderer.stop_token_ids]  # 1 decodes away
    plain = [*renderer.encode("7"), *renderer.stop_token_ids]
    pool = RecordingPool([odd, plain, plain])
    policy = TokenPolicy(pool, renderer, "g", None)
    for _ in range(2):
        said = (await policy.complete([USER], Sampling(max_tokens=8))).message
    await policy.complete([USER, said, FOLLOW_UP], Sampling(max_tokens=8))
    assert pool.prompts[2] == [*renderer.prompt([USER, said, FOLLOW_UP]).token_ids]


async def test_what_follows_a_stop_text_of_two_servers_is_not_trained_on() -> None:
    class TwoServers(RecordingPool):
        async def generate(self, request: Request) -> Generation:
            rest = await super().generate(request)
            begun = replace(rest, token_ids=array("i", renderer.encode("1+")), spans=(Span(3, 2),))
            return joined(replace(begun, logprobs=array("f", [-0.5] * 2)), rest)

    renderer = renderer_with()
    pool = TwoServers([renderer.encode("2=345")])
    sampling = Sampling(max_tokens=8, stop=("+2",))
    said = await TokenPolicy(pool, renderer, "g", None).complete([USER], sampling)
    assert said.message.content == "1"
    assert said.finish_reason == "stop"
    assert list(said.completion_ids) == renderer.encode("1+2")
    assert said.spans == (Span(3, 3),)


async def test_each_request_has_a_debug_message(caplog: pytest.LogCaptureFixture) -> None:
    renderer = renderer_with()
    ids = [*renderer.encode("12"), *renderer.stop_token_ids]
    policy = TokenPolicy(RecordingPool([ids]), renderer, "3.1", None)
    with caplog.at_level("DEBUG", logger="telescope_train"):
        await policy.complete([USER], Sampling(max_tokens=8))
    (said,) = [record.getMessage() for record in caplog.records]
    num_prompt = len(renderer.prompt([USER]).ids)
    assert f"request of 3.1: {num_prompt} prompt tokens, {len(ids)} sampled in" in said
    assert "ended by stop; turn 1" in said


@pytest.mark.parametrize(
    ("is_included", "content", "num_chains"), [(True, "7</s>", 1), (False, "7", 2)]
)
async def test_an_answer_with_its_stop_text_is_reused_as_it_was_sampled(
    is_included: bool, content: str, num_chains: int
) -> None:
    renderer = renderer_with()
    first, second = renderer.encode("7</s>"), [*renderer.encode("8"), *renderer.stop_token_ids]
    pool = RecordingPool([first, second])
    policy = TokenPolicy(pool, renderer, "g", None)
    sampling = Sampling(max_tokens=8, stop=("</s>",), include_stop_str_in_output=is_included)
    said = (await policy.complete([USER], sampling)).message
    assert said.content == content
    await policy.complete([USER, said, FOLLOW_UP], sampling)
    places = [turn.completion.tokens for turn in policy.turns]
    # The tokens that are trained on are the same in both: all that were sampled.
    assert list(places[0].completion_ids) == first
    assert len(chains_of(places)) == num_chains
    is_extended = pool.prompts[1][: len(pool.prompts[0]) + len(first)] == [
        *pool.prompts[0],
        *first,
    ]
    assert is_extended is is_included


async def test_what_an_environment_begins_with_is_ready_with_its_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a rollout of it has asked."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    renderer = renderer_with(
        "{% if tools %}<|tools|>{% endif %}"
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    )
    # How this template writes calls is not known, and nothing is called.
    monkeypatch.setattr(renderer, "_require", lambda uses: None)
    texts = list[str]()
    rendered = renderer.text

    def text(messages: Sequence[Message], **named: Any) -> str:
        texts.append(messages[0].content)
        return rendered(messages, **named)

    monkeypatch.setattr(renderer, "text", text)
    source = TokenPolicySource(
        RecordingPool([renderer.encode("2")] * 3), renderer, max_model_len=None
    )
    sampling = Sampling(max_tokens=8)
    await source.prepare("calculator", [USER])
    policy = source.policy("a/0")
    await policy.complete([USER], sampling, tools=tools)
    assert policy.recorder.tools == tuple(tools)
    await source.prepare("calculator", [FOLLOW_UP])
    await source.prepare("another", [other := Message(role="user", content="3+3=")])
    texts.clear()
    await source.policy("b/0").complete([FOLLOW_UP], sampling, tools=tools)
    await source.policy("c/0").complete([other], sampling)
    assert texts == []


def test_a_turn_cut_short_is_ended_by_the_template_once() -> None:
    renderer = renderer_with()
    cut = tuple(renderer.encode("12"))
    said = Message(role="assistant", content="12")
    conversations = answered(renderer, renderer.prompt([USER]), cut, said)
    messages = [USER, said, FOLLOW_UP]
    prompt = conversations.prompt_for(messages)
    assert prompt.token_ids == renderer.prompt(messages).token_ids
    assert prompt.num_ends_added == 1


def test_a_template_that_rewrites_history_starts_a_new_chain() -> None:
    renderer = renderer_with(FORGETS_THINKING)
    thought = (*renderer.encode("hm!2"), *renderer.stop_token_ids)
    first = renderer.prompt([USER])
    said = Message(role="assistant", content="hm!2")
    conversations = answered(renderer, first, thought, said)
    messages = [USER, said, FOLLOW_UP]
    ids = conversations.prompt_for(messages).token_ids
    assert ids == renderer.prompt(messages).token_ids
    kept = (*first.token_ids, *thought)
    assert ids[: len(kept)] != kept


async def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    pool = RecordingPool([])
    policy = TokenPolicy(pool, renderer_with(), "g", 10)
    with pytest.raises(ConfigError, match=r"\b10\b.*lower max_tokens"):
        await policy.complete([USER], Sampling(max_tokens=8))
    assert pool.prompts == [], "no server is asked"


def reply_of(token_ids: list[int], logprobs: list[float], **fields: Any) -> TokenReply:
    return TokenReply(
        0,
        token_ids=array("i", token_ids).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        **{"finish_reason": "stop", **fields},
    )


@pytest.mark.parametrize(
    ("reply", "fact"),
    [
        (reply_of([1, 2], []), "log-prob"),
        (reply_of([1, 2], [-1.0]), "log-prob"),
        (reply_of([1], [-1.0], finish_reason="abort"), "abort"),
        (TokenReply(0, error="ValueError: prompt too long"), "ValueError: prompt too long"),
    ],
)
def test_a_reply_that_is_no_generation_is_an_error_of_its_server(reply, fact) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_reply(reply, "http://x")
    said = str(caught.value)
    assert fact in said
    assert "http://x" in said


def test_versions_are_read_from_spans() -> None:
    spans = (VersionSpan("2", 0), VersionSpan("3", 1))
    reply = reply_of([5, 6], [-1.0, -2.0], finish_reason="length", versions=spans)
    generation = parse_reply(reply, "http://x")
    assert (generation.oldest_version, generation.newest_version) == (2, 3)
    assert list(generation.token_ids) == [5, 6]
    assert list(generation.logprobs) == [-1.0, -2.0]
    assert parse_version("default") == 0


MUSES = CHATML.replace(
    "{{ m['content'] }}",
    "{{ '!' + m.reasoning_content + '!' if m.reasoning_content }}{{ m['content'] }}",
)
ADDER: list[dict[str, JsonValue]] = [{"type": "function", "function": {"name": "add"}}]
LOSES = {
    "tools": (ADDER, "2!", "it is not known how this model writes tool calls"),
    "thinking": ([], "!2!3", "the model thinks"),
}


@pytest.mark.parametrize("what", LOSES)
async def test_a_rollout_in_which_something_was_lost_has_failed(what: str) -> None:
    """A program may go on without the answer, but its reward says nothing about the policy."""
    tools, written, said = LOSES[what]
    renderer = renderer_with(MUSES)
    ids = [*renderer.encode(written), *renderer.stop_token_ids]
    policy = TokenPolicy(RecordingPool([ids]), renderer, "g", None)
    with pytest.raises(TemplateLossError, match=said):
        await policy.complete([USER], Sampling(max_tokens=9), tools=tools)
    assert said in str(policy.recorder.failure)
    assert policy.turns == []


async def test_each_request_of_a_seeded_rollout_has_a_seed_of_its_own() -> None:
    renderer = renderer_with()
    end = renderer.stop_token_ids[0]

    async def seeds_of(seed: int | None, *others: int) -> list[int | None]:
        pool = RecordingPool([[5, end]] * 3)
        policy = TokenPolicy(pool, renderer, "g", None, seed=seed)  # type: ignore[arg-type]
        for own in (seed, seed, *others):
            await policy.complete([USER], Sampling(max_tokens=4, seed=own))
        return pool.seeds

    first, second = await seeds_of(7)
    assert first != second
    assert await seeds_of(7) == [first, second]
    assert not {first, second} & {*(await seeds_of(8))}
    assert await seeds_of(7, 99) == [first, second, 99], "a program's own seed was changed"
    assert await seeds_of(None) == [None, None]
