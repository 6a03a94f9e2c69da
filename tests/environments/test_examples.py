"""The example environments: what their pages say of them holds."""

import importlib
import json
import re
import subprocess
from pathlib import Path
from random import Random

import pytest
from tests.asking import ask

from telescope_core import Sampling, Split, StopReason
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def game(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module("guess_number")
    return InProcessEnvironment(module.GuessNumber.from_settings({"largest": 64}), name="game")


async def play(client, replies):
    request = ask(split=Split.EVAL)
    return await client.play(request, ScriptedClient(replies).policy("r"))


async def test_halving_finds_every_number(game):
    for index in range(6):
        gold = await game.gold(Split.EVAL, index)
        assert gold is not None
        assert gold.reward == 1.0
        assert len(gold.turns) <= 7
        assert gold.stop_reason is StopReason.COMPLETED
        assert gold.tags["stopped_by"] == "found"
        assert len(gold.info) == len(gold.turns) - 1
    await game.close()


async def test_what_is_no_guess_is_told_and_what_is_repeated_is_counted(game):
    rollout = await play(game, ["hm", "<guess>1</guess>", "<guess>1</guess>"])
    await game.close()
    assert rollout.messages[3].content == "That is no guess. Write <guess>NUMBER</guess>."
    assert rollout.messages[5].content == "Higher."
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert rollout.reward == 0.0
    assert rollout.metrics == {"repeated": 10.0}


async def test_the_fastest_of_a_group_earn_more(game):
    def answer(messages):
        tries = sum(message.role == "assistant" for message in messages)
        return f"<guess>{tries + 1}</guess>"

    settings = EvalSettings(num_examples=4, rollouts=2, sampling=Sampling(max_tokens=8))
    result = await run_eval(game, ScriptedClient(answer), settings)
    await game.close()
    rewards = {reward for task in result.tasks for reward in task.rewards}
    assert rewards <= {0.0, 1.2}
    assert result.num_scored == 8


def test_the_example_is_short_and_is_what_its_page_shows():
    code = (ROOT / "examples" / "guess_number.py").read_text()
    environment = code[code.index("class GuessNumber") :]
    assert len([line for line in environment.splitlines() if line.strip()]) <= 60
    assert environment in (ROOT / "docs" / "how-to" / "several-turns.md").read_text()


@pytest.fixture
def nim(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return InProcessEnvironment(importlib.import_module("nim").Nim.from_settings({}), name="nim")


def best_move(messages):
    left = int(messages[-1].content.split()[0])
    return str(left % 4 or 1)


async def test_a_match_is_won_by_who_plays_it_well(nim):
    """Both seats leave a multiple of 4 if they can, so the first one wins unless it has one."""
    for index, won in enumerate([0.0, 1.0, 1.0, 1.0, 0.0, 1.0]):
        client = ScriptedClient(best_move)
        played = await nim.play(ask(example_index=index), client.policy("r"))
        assert played.metrics == {"seat_reward/first": won, "seat_reward/second": 1 - won}
        assert played.reward == 0.5
    played = await nim.play(ask(), ScriptedClient(["none of them"]).policy("r"))
    assert played.metrics == {"seat_reward/first": 0.0, "seat_reward/second": 1.0}
    await nim.close()


def test_the_match_is_what_its_page_shows():
    code = (ROOT / "examples" / "nim.py").read_text()
    page = (ROOT / "docs" / "how-to" / "play-a-match.md").read_text()
    assert code[code.index("import re") :].strip() in page


def test_demonstrations_of_the_agent_show_what_the_shell_prints(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    agent = importlib.import_module("agent")
    source, shown = agent.Numbers().examples(Split.TRAIN), set()
    for index in range(12):
        example, folder = source.example(index), tmp_path / f"{index}"
        folder.mkdir()
        lines = [f"{number}\n" for number in example.info["numbers"]]
        (folder / example.info["file"]).write_text("".join(lines))
        row = agent.demonstration(example, Random(index))
        for said, result in zip(row["messages"][2:6:2], row["messages"][3:6:2], strict=True):
            (call,) = said["tool_calls"]
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True
            )
            assert done.stdout.strip() == result["content"]
            shown.add(command.replace(example.info["file"], "{}"))
    assert shown == {"ls", *(command for _, command in agent.QUESTIONS.values())}


@pytest.mark.parametrize(
    ("page", "title", "most_lines"),
    [
        ("tutorials/first-environment.md", "capitals.py", 8),
        ("how-to/judge-rewards.md", "rain.py", 6),
    ],
)
async def test_a_short_environment_of_the_docs_is_whole(
    page, title, most_lines, tmp_path, monkeypatch
):
    text = (ROOT / "docs" / page).read_text()
    blocks = dict(
        re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    )
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    assert len([line for line in blocks[title].splitlines() if line.strip()]) <= most_lines
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(title.removesuffix(".py"))
    environment = getattr(module, title.removesuffix(".py").capitalize()).from_settings({})
    client = InProcessEnvironment(environment, name="short")
    sizes = (await client.describe()).num_examples
    held_out = await client.example(Split.EVAL, 0)
    await client.close()
    assert sum(sizes.values()) == 3
    assert held_out.prompt.startswith(("What is the capital", "Describe"))
