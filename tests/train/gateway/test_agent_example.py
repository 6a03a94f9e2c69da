"""`examples/agent.py`: what its agent is taught is what it is asked, token by token."""

import importlib
import json
import sys
from pathlib import Path
from random import Random

import pytest
from tests.asking import ask

sys.path.insert(0, str(Path(__file__).parent))
from agent_trees import SAMPLING, CountedPool, gateway_of
from test_compaction import require_as_sampled

from telescope_core import Split
from telescope_core.base.messages import message_from_json
from telescope_core.gateway import RecordedEnvironment
from telescope_core.harnesses.compaction_program import SUMMARY
from telescope_core.in_process import InProcessEnvironment
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.formats import same_words
from telescope_train.chat.proof import Use, uses_declared
from telescope_train.chat.renderer import Renderer
from telescope_train.chat.supervised import render_conversations
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.models.tiny import character_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("agent")


@pytest.fixture
def renderer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (EXAMPLES / "agent.jinja").read_text()
    return Renderer(tokenizer, stop_token_ids=[tokenizer.eos_token_id])


def test_its_template_loses_nothing_of_an_agent(renderer):
    uses = uses_declared(sends_system=True, offers_tools=True, goes_on=True)
    refused = {use: renderer.refusal(use) for use in (Use.ANSWERS, Use.PARALLEL_CALLS, *uses)}
    assert {use: reason for use, reason in refused.items() if reason is not None} == {}


def test_demonstrations_are_learned_behind_the_prompts_of_rollouts(example, renderer):
    shown = example.Numbers().examples(Split.TRAIN).example(0)
    row = example.demonstration(shown, Random(0))
    messages, tools = [message_from_json(one) for one in row["messages"]], row["tools"]
    tokenizer = renderer._tokenizer
    ((sample,),) = render_conversations(tokenizer, [messages], tools=[tools])
    ids, end = sample.token_ids.tolist(), tokenizer.eos_token_id
    prompt, num_learned = renderer.prompt(messages[:2], tools=tools), 0
    for place in (2, 4, 6):
        start = len(prompt.ids)
        assert ids[:start] == prompt.ids.tolist()
        said = ids[start : ids.index(end, start) + 1]
        assert sample.mask[start : start + len(said)].all()
        num_learned += len(said)
        read = renderer.parse(said, tools=tools, prompt=prompt)
        assert same_words(read, messages[place])
        if place < 6:
            told = [*prompt.messages, read, messages[place + 1]]
            prompt = renderer.extended(prompt, said, told, tools=tools)
            assert prompt is not None
    assert num_learned == sample.mask.sum()


def answers(questions, prompt: str) -> str:
    """Look for the file, run the right command on it, and say what it printed, also as summary."""
    if SUMMARY in prompt:
        return prompt.partition(f"{SUMMARY}\n")[2].partition("<|end|>")[0]
    results = [one.partition("<|end|>")[0] for one in prompt.split("<|tool|>")[1:]]
    (command,) = (how for question, (_, how) in questions.items() if question in prompt)
    asked = command.format(results[0]) if results else "ls"
    if command.partition("{")[0] in prompt:
        return results[-1]
    return f"[shell(command={json.dumps(asked)})]"


def require_as_demonstrated(example, renderer, rollout, asked):
    """Assert that the two contexts of a right rollout are those that are shown for one."""
    right = example.QUESTIONS[asked.prompt][1].format(asked.info["file"])
    draws = (example.demonstration(asked, Random(seed)) for seed in range(1000))
    row = next(one for one in draws if json.dumps(right) in json.dumps(one["messages"]))
    shown = [
        renderer.prompt([message_from_json(one) for one in context["messages"]], tools=row["tools"])
        for context in example.summarized(row)
    ]
    assert [
        renderer.prompt(messages, tools=row["tools"]).ids.tolist()
        for messages in rollout.conversations
    ] == [one.ids.tolist() for one in shown]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "sliding_window", "summarize"])
async def test_right_commands_earn_the_reward_in_a_sandbox(example, renderer, strategy):
    options = {"instructions": example.INSTRUCTIONS, "context_strategy": strategy}
    config = example.Numbers.Config(
        harness_options=options | {"max_context_tokens": 110, "keep_turns": 1}
    )
    client = RecordedEnvironment(InProcessEnvironment(example.Numbers(config), name="agent"))
    pool = CountedPool(renderer, lambda prompt: answers(example.QUESTIONS, prompt))
    shown = example.Numbers().examples(Split.TRAIN)
    first = {shown.example(index).prompt: index for index in reversed(range(40))}
    assert first.keys() == example.QUESTIONS.keys()
    async with gateway_of() as gateway:
        source = TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway)
        for index in first.values():
            pool.answered.clear()
            request = ask(example_index=index, sampling=SAMPLING, deadline_s=300.0)
            rollout = await client.play(request, source.policy(f"{index}/0", SAMPLING))
            wrote = [note.value for note in rollout.info]
            num_turns = 4 if strategy == "summarize" else 3
            assert (rollout.reward, len(rollout.turns)) == (1.0, num_turns), (rollout.error, wrote)
            samples = samples_from_rollout(rollout, 1.0, 1.0)
            assert len(samples) == (1 if strategy == "none" else 2)
            require_as_sampled(samples, pool)
            if strategy == "summarize":
                require_as_demonstrated(example, renderer, rollout, shown.example(index))
    await client.close()
