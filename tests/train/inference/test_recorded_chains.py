"""A policy records what the server saw and sampled, and holds it once while a rollout is played."""

import asyncio
import gc
import random
import tracemalloc
from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.inference.test_token_policy import FORGETS_THINKING, renderer_with

from telescope_core.base.chains import chains_of, sampled_tokens
from telescope_core.types import Message, Rollout, Sampling
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.conversations import Conversations
from telescope_train.inference.generation import Generation, Span
from telescope_train.inference.policy import TokenPolicy

DIGITS = "0123456789"
STRAIGHT = renderer_with()
REWRITES = renderer_with(FORGETS_THINKING)


class Writer:
    """A server that writes digits, with a thought before them if asked, and notes every request."""

    def __init__(self, renderer, *, seed=0, size=3, thought=0):
        self.record: list[tuple[list[int], Generation]] = []
        self._size, self._thought = size, thought
        self._ids = {one: renderer.encode(one)[0] for one in (*DIGITS, "!")}
        self._random = random.Random(seed)

    async def generate(self, request):
        text = "".join(self._random.choices(DIGITS, k=self._size))
        if self._thought:
            text = "".join(self._random.choices(DIGITS, k=self._thought)) + "!" + text
        ids = [*(self._ids[one] for one in text), request.stop_token_ids[0]]
        generation = Generation(
            token_ids=array("i", ids),
            logprobs=array("f", [-self._random.random() for _ in ids]),
            finish_reason="stop",
            spans=(Span(0, len(ids)),),
        )
        self.record.append((list(request.prompt_ids), generation))
        return generation


def rollout_of(policy):
    return Rollout(
        environment="e", example_id="x", group_id="g", index=0, turns=tuple(policy.turns)
    )


def require_as_sampled(policy, writer):
    """Every turn is what the server saw and sampled, and is trained on exactly there."""
    assert len(policy.turns) == len(writer.record)
    for turn, (prompt_ids, generation) in zip(policy.turns, writer.record, strict=True):
        completion = turn.completion
        assert completion.prompt_ids.tolist() == prompt_ids
        assert completion.completion_ids == generation.token_ids
        assert completion.logprobs == generation.logprobs
    samples = samples_from_rollout(rollout_of(policy), 1.0, 1.0)
    assert len(samples) == len(chains_of(turn.completion.tokens for turn in policy.turns))
    for prompt_ids, generation in writer.record:
        whole = [*prompt_ids, *generation.token_ids]
        there = slice(len(prompt_ids), len(whole))
        homes = [one for one in samples if one.token_ids[: len(whole)].tolist() == whole]
        assert any(
            one.mask[there].all()
            and np.array_equal(one.behavior_logprobs[there], generation.logprobs)
            for one in homes
        )
    num_sampled = sum(len(generation.token_ids) for _, generation in writer.record)
    assert sum(int(one.mask.sum()) for one in samples) == num_sampled


def user(text):
    return Message(role="user", content=text)


async def play(renderer, kind, *, num_turns=6, **how):
    """Play turns that go straight on, branch off from an earlier turn, or are compacted."""
    writer = Writer(renderer, **how)
    policy = TokenPolicy(writer, renderer, "g", None)
    messages = [user("1+1=")]
    for number in range(num_turns):
        completion = await policy.complete(messages, Sampling(max_tokens=100))
        messages = [*messages, completion.message, user(f"{number}+2=")]
        if kind == "branched" and number % 2:
            messages = [*messages[:3], user(f"{number}+7=")]
        if kind == "compacted" and number == num_turns // 2:
            messages = [user("so far 4; 3+3=")]
    return policy, writer


@pytest.mark.parametrize(
    ("kind", "renderer", "thought", "num_chains"),
    [
        ("straight", STRAIGHT, 0, 1),
        ("rewritten", REWRITES, 5, 6),
        ("branched", STRAIGHT, 0, 3),
        ("compacted", STRAIGHT, 0, 2),
    ],
)
async def test_turns_are_what_was_sampled(kind, renderer, thought, num_chains):
    policy, writer = await play(renderer, kind, thought=thought)
    require_as_sampled(policy, writer)
    assert len(chains_of(turn.completion.tokens for turn in policy.turns)) == num_chains


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["on", "on", "back", "anew", "again"]), st.integers(0, 30)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([(STRAIGHT, 0), (REWRITES, 4)]),
    st.booleans(),
)
async def test_any_conversation_is_recorded_as_sampled(steps, how, interleaved):
    renderer, thought = how
    writer = Writer(renderer, thought=thought)
    policy = TokenPolicy(writer, renderer, "g", None, interleaved=interleaved)
    messages = [user("0=")]
    asked = [messages]
    for step, where in steps:
        said = (await policy.complete(messages, Sampling(max_tokens=100))).message
        if step == "on":
            messages = [*messages, said, user(f"{where}=")]
        elif step == "back":
            messages = [*asked[where % len(asked)], user(f"{where}+")]
        elif step == "anew":
            messages = [user(f"{where}-")]
        asked.append(messages)
    require_as_sampled(policy, writer)


async def test_going_on_from_an_earlier_answer_reuses_its_ids_although_its_text_was_let_go():
    writer = Writer(STRAIGHT)
    policy = TokenPolicy(writer, STRAIGHT, "g", None)
    messages = [user("1+1=")]
    for _ in range(3):
        said = (await policy.complete(messages, Sampling(max_tokens=9))).message
        messages = [*messages, said, user("2=")]
    await policy.complete([*messages[:4], user("3=")], Sampling(max_tokens=9))
    (prompt, said), (back, _) = writer.record[1], writer.record[3]
    assert back[: len(prompt) + len(said.token_ids)] == [*prompt, *said.token_ids]


def test_a_rollout_in_play_holds_its_tokens_once():
    """Measure: what a policy holds for 40 turns of 32k tokens, its text and messages included.

    A token of this tokenizer is one character, which is held in its message, and once more in the
    text of the last prompt: 2 bytes on top of the 4 + 4 of its id and log-prob.
    """

    async def measure() -> float:
        # What the renderer remembers over all rollouts is not of this one.
        await play(STRAIGHT, "straight", num_turns=2, size=4)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        policy, writer = await play(STRAIGHT, "straight", num_turns=40, size=810)
        num_tokens = policy.turns[-1].completion.tokens.completion_end
        writer.record.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert num_tokens > 32_000
        return (after - before) / num_tokens

    assert asyncio.run(measure()) <= 1.2 * (8 + 2)


async def test_samples_of_a_long_rollout_compare_nothing(monkeypatch):
    policy, _ = await play(STRAIGHT, "straight", num_turns=12)
    chain = policy.turns[0].completion.tokens.chain
    read: list[tuple[int, int]] = []
    token_ids = type(chain).token_ids
    monkeypatch.setattr(
        type(chain),
        "token_ids",
        lambda self, start, stop: (read.append((start, stop)), token_ids(self, start, stop))[1],
    )
    (sample,) = samples_from_rollout(rollout_of(policy), 1.0, 1.0)
    assert read == [(0, len(sample.token_ids))]
    ends = [turn.completion.tokens.completion_end for turn in policy.turns]
    assert all(one < other for one, other in pairwise(ends))


def test_equal_tools_of_later_requests_are_not_held_again():
    """A program sends its tools with every request, and each request is read anew."""
    conversations, messages = Conversations(STRAIGHT), [user("1+1=")]
    said = Message(role="assistant", content="2")
    for _ in range(3):
        prompt = STRAIGHT.prompt(messages)
        tokens = sampled_tokens(prompt.token_ids, [3], [-1.0])
        tools = [{"type": "function", "function": {"name": "add"}}]
        conversations.add(prompt, said, tokens, tools=tools)
        messages = [*messages, said, user("2=")]
    first, *others = conversations._answers
    assert len(others) == 2
    assert all(other.tools is first.tools for other in others)
