"""The environments of the page on safe code: gold passes, cheats stay at 0, tools do their work."""

import importlib
import json
import re
from pathlib import Path

import pytest
from tests.asking import ask

from telescope_core import Split
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "run-code-safely.md").read_text()


@pytest.fixture
async def client(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module("code_grading")
    made = InProcessEnvironment(module.WriteFunction.from_settings({}), name="code")
    yield made
    await made.close()


@pytest.mark.slow
async def test_gold_passes(client):
    for index in range(3):
        gold = await client.gold(Split.TRAIN, index)
        assert gold is not None
        assert (gold.reward, gold.error) == (1.0, None)


@pytest.mark.parametrize(
    "answer",
    [
        "```python\ndef largest(x):\n    return x[0]\n```",
        "class A:\n    def __eq__(self, o): return True\ndef largest(x): return A()",
        "import os\nos.kill(1, 9)\nos._exit(0)",
        "I do not know.",
    ],
)
async def test_what_is_wrong_has_reward_0(client, answer):
    rollout = await client.play(ask(split=Split.TRAIN), ScriptedClient([answer]).policy("r"))
    assert (rollout.reward, rollout.error) == (0.0, None)


def test_the_page_shows_the_example():
    code = (ROOT / "examples" / "code_grading.py").read_text()
    shown = code[code.index("class WriteFunction") :]
    assert shown in PAGE


async def test_the_environment_with_tools_is_whole(tmp_path, monkeypatch):
    (code,) = re.findall(r'^```python title="analyst.py"\n(.*?)^```$', PAGE, re.M | re.DOTALL)
    (tmp_path / "analyst.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    client = InProcessEnvironment(
        importlib.import_module("analyst").Analyst.from_settings({}), name="analyst"
    )
    example = await client.example(Split.TRAIN, 0)
    last = int(example.id)
    code = f"open('answer.txt', 'w').write(str(sum(range({last} + 1))))"
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    replies = {1.0: [f"<tool_call>{call}</tool_call>", "It is done."], 0.0: ["It is done."]}
    for expected, said in replies.items():
        rollout = await client.play(ask(split=Split.TRAIN), ScriptedClient(said).policy("r"))
        assert (rollout.reward, rollout.error) == (expected, None)
    assert sum((await client.describe()).num_examples.values()) == 3
    await client.close()
