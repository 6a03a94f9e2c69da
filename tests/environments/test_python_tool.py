"""Python tool: programs in a real sandbox that solve each kind of problem, fail or hang."""

import json
import random
import re

import pytest
from tests.asking import ask

from telescope_core import Sampling, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_python_tool import PythonTool
from telescope_env_telescope_python_tool.problems import KINDS, draw_problem

PROGRAMS = {
    "divisible": "print(sum(n for n in range(1, {0}) if n % {3} and 0 in (n % {1}, n % {2})))",
    "prime": "print(sum(n > 1 and all(n % d for d in range(2, n)) for n in range({0}, {1} + 1)))",
    "halve": "n, s = {0}, 0\nwhile n > 1: n, s = [n // 2, 3 * n + 1][n % 2], s + 1\nprint(s)",
    "decimal": "print(sum(map(int, str(pow({0}, {1})))))",
    "remainder": "n = {0}\nfor _ in range({1}): n = (n * {2} + {3}) % {4}\nprint(n)",
    "both ends": "print(sum(str(n) == ''.join(reversed(str(n))) for n in range({0}, {1} + 1)))",
}


def call(code: str) -> str:
    call = {"name": "python", "arguments": {"code": code}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def programmer(messages) -> str:
    """Write a program for the problem, and answer with what it prints."""
    if "<tool_response>" in messages[-1].content:
        printed = re.search(r"<tool_response>\n(-?\d+)\n", messages[-1].content)[1]
        return f"<answer>{printed}</answer>"
    problem = messages[-1].content.partition(" Use Python")[0]
    kind = next(kind for kind in PROGRAMS if kind in problem)
    numbers = re.findall(r"\d+", problem)
    return call(PROGRAMS[kind].format(*(numbers[1:] if kind == "divisible" else numbers)))


async def play(environment, replies, *, index=0):
    request = ask(
        split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=600
    )
    client = InProcessEnvironment(environment, name="python")
    return await client.play(request, ScriptedClient(replies).policy("r"))


@pytest.mark.slow
async def test_a_policy_that_writes_programs_is_right():
    environment = PythonTool(PythonTool.Config(size=500))
    source = environment.examples(Split.EVAL)
    texts = [source.example(index).prompt for index in range(40)]
    chosen = [next(index for index, text in enumerate(texts) if kind in text) for kind in PROGRAMS]
    for index in chosen:
        rollout = await play(environment, programmer, index=index)
        assert rollout.reward == 1.0, rollout.messages
        assert rollout.metrics["tool_calls/python"] == 1
    await environment.close()


async def test_programs_that_fail_are_told_and_files_stay():
    environment = PythonTool()
    gold = environment.gold_answer(environment.examples(Split.EVAL).example(0))
    rollout = await play(
        environment,
        [
            call("open('n', 'w').write('7')"),
            call("print(open('n').read() * 2)"),
            call("1 / 0"),
            call("import socket; socket.create_connection(('192.0.2.1', 80), timeout=0.5)"),
            gold,
        ],
    )
    told = [one.content for one in rollout.messages if "<tool_response>" in one.content]
    assert "77" in told[1]
    assert "ZeroDivisionError" in told[2]
    assert "Error" in told[3]
    assert rollout.reward == 1.0
    await environment.close()


@pytest.mark.slow
async def test_a_program_that_hangs_is_stopped_and_told():
    environment = PythonTool(PythonTool.Config(program_timeout_s=0.2))
    gold = environment.gold_answer(environment.examples(Split.EVAL).example(0))
    rollout = await play(environment, [call("while True: pass"), gold])
    [told] = [one.content for one in rollout.messages if "<tool_response>" in one.content]
    assert "[stopped after 0.2 s]" in told
    assert rollout.reward == 1.0
    await environment.close()


async def test_numbers_are_read_strictly():
    environment = PythonTool()
    answer = environment.examples(Split.EVAL).example(0).answer
    for text, reward in [
        (f"<answer> {int(answer):,} </answer>", 1.0),
        (f"<answer>{answer}</answer><answer>{int(answer) + 1}</answer>", 0.0),
        (f"<answer>{answer}.5</answer>", 0.0),
        (f"<answer>it is {answer}</answer>", 0.0),
        (answer, 0.0),
        ("<answer>\u0663</answer>", 0.0),
        ("<answer>nan</answer>", 0.0),
    ]:
        assert (await play(environment, [text])).reward == reward, text


def test_every_kind_is_drawn_and_answers_are_no_number_of_the_question():
    rng = random.Random(0)
    texts = [draw_problem(rng, 300).text for _ in range(100)]
    assert {next(kind for kind in PROGRAMS if kind in text) for text in texts} == set(PROGRAMS)
    assert len(KINDS) == len(PROGRAMS)
    source = PythonTool().examples(Split.TRAIN)
    for index in range(60):
        example = source.example(index)
        assert example.answer not in re.findall(r"\d+", example.prompt)


def test_a_program_must_end_before_its_call_does():
    with pytest.raises(ConfigError, match=r"program_timeout_s.*\b30\b"):
        PythonTool.from_settings({"program_timeout_s": 30})
