"""The teaching example: a model that uses the calculator, one that does not, and its length."""

import inspect
import json
import re

import pytest
from tests.asking import ask

import telescope_env_telescope_tool_calculator as module
from telescope_core import Sampling, Split
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_tool_calculator import ToolCalculator

OPERATIONS = {"add": "+", "subtract": "-", "multiply by": "*"}


def careful(messages) -> str:
    """Work the chain out step by step with the tool, as a model should."""
    chain = next(message.content for message in messages if message.role == "user")
    results = [
        int(found)
        for message in messages[1:]
        for found in re.findall(r"<tool_response>\n(-?\d+)\n", message.content)
    ]
    steps = re.findall(r"Then (\D+) (\d+)\.", chain)
    total = results[-1] if results else int(re.search(r"Start with (\d+)", chain)[1])
    if len(results) == len(steps):
        return f"The result is {total:,}."
    words, number = steps[len(results)]
    arguments = {"left": total, "operation": OPERATIONS[words], "right": int(number)}
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': arguments})}</tool_call>"


async def play(environment, replies, *, index=0):
    request = ask(example_index=index, sampling=Sampling(max_tokens=16))
    client = InProcessEnvironment(environment, name="calculator")
    return await client.play(request, ScriptedClient(replies).policy("r"))


@pytest.mark.parametrize("num_steps", [1, 3])
async def test_a_model_that_uses_the_tool_is_right(num_steps):
    environment = ToolCalculator(ToolCalculator.Config(num_steps=num_steps))
    rollouts = [await play(environment, careful, index=index) for index in range(10)]
    assert [rollout.reward for rollout in rollouts] == [1.0] * 10
    assert {rollout.metrics["tool_calls/calculate"] for rollout in rollouts} == {num_steps}
    assert {rollout.metrics["tool_errors"] for rollout in rollouts} == {0.0}


async def test_a_wrong_operation_is_told_and_can_be_made_good():
    call = '<tool_call>{"name": "calculate", "arguments": %s}</tool_call>'
    wrong = call % '{"left": 1, "operation": "/", "right": 2}'
    right = call % '{"left": 1, "operation": "+", "right": 2}'
    rollout = await play(ToolCalculator(), [wrong, right, "3"])
    assert "operation: Input should be '+', '-' or '*'" in rollout.messages[3].content
    assert rollout.metrics["tool_errors/bad_arguments"] == 1
    assert rollout.metrics["tool_errors_recovered"] == 1
    assert rollout.reward == 0.0


def test_the_question_never_holds_its_answer():
    source = ToolCalculator(ToolCalculator.Config(max_number=9, num_steps=1)).examples(Split.TRAIN)
    for index in range(40):
        example = source.example(index)
        assert example.answer not in re.findall(r"-?\d+", example.prompt)


def test_it_is_short_enough_to_read_and_evaluates_nothing():
    source = inspect.getsource(module)
    assert len([line for line in source.splitlines() if line.strip()]) <= 85
    assert not re.search(r"(?<![.\w])(eval|exec|compile)\(", source)
