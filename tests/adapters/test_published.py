"""Environments as others published them: linked, evaluated by the command, and scored as they do.

Each is played by `telescope eval` against a model on vLLM. Then a program that knows the framework
alone is given the same replies, or asks the same model, and every reward must be the same.
"""

import asyncio
import hashlib
import importlib
import json
import re
import subprocess
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.linking import WAIT, Choose, by_itself, link, model_endpoint, telescope
from tests.ports import free_port

from telescope_envs.install.adapted import environment_for

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("home")]
NUM_EXAMPLES = 6
REASONING_GYM = Path(__file__).parents[2] / "packages/telescope-envs/environments/reasoning-gym"
LOW = {"reward_min": -2000.0, "reward_max": 100.0, "max_turns": 20}
WORDS = {
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "Taxi-v4": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack-v1": ("stick", "hit"),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published environment."""

    id: str
    packages: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=lambda: {"max_turns": 20})
    moves: tuple[str, ...] = ()
    """What the policy says; empty = it calls tools, and then says what they told."""


GYM = (
    Published(id="CliffWalking-v1", settings=LOW, moves=WORDS["CliffWalking-v1"]),
    Published(id="Taxi-v4", settings=LOW, moves=WORDS["Taxi-v4"]),
    Published(
        id="Blackjack-v1",
        settings={**LOW, "observation": "value"},
        moves=WORDS["Blackjack-v1"],
    ),
)
TEXTARENA = (
    Published(id="Blackjack-v0", moves=("[Hit]", "[Stand]")),
    Published(id="GuessTheNumber-v0", moves=tuple(f"[{n}]" for n in range(1, 21))),
    Published(id="2048-v0-ultra-easy", settings=LOW, moves=("[up]", "[down]", "[left]", "[right]")),
)
SCORER = "agent_threat_bench_scorer"
EVALS = ("inspect-evals", "openai")
INSPECT = (
    Published(
        id="inspect_evals/agent_threat_bench_memory_poison",
        packages=EVALS,
        settings={"scorer": f"{SCORER}/security"},
    ),
    Published(
        id="inspect_evals/agent_threat_bench_autonomy_hijack",
        packages=EVALS,
        settings={"scorer": f"{SCORER}/security"},
    ),
    Published(
        id="inspect_evals/agent_threat_bench_data_exfil",
        packages=EVALS,
        settings={"scorer": f"{SCORER}/security"},
    ),
)
DOSE = "Adults of usual weight take 7 mg of it with water, each morning before they eat."
SERVERS = {
    "made by openenv init": (
        ("openenv==0.10.0",),
        {"max_turns": 3, "reward_max": 3.0},
        ("yes", "a longer answer", "one that earns the most"),
    ),
    "korrel": (
        ("openenv==0.10.0", "korrel==0.1.3"),
        {"max_turns": 5, "action_field": "content"},
        ("It costs 7.", "I do not know.", "Please wait."),
    ),
    "openenv-dipg-safety": (
        ("openenv-dipg-safety==0.1.67",),
        {"reward_min": -100.0, "reward_max": 100.0},
        (
            f"<think>It says so.</think><proof>{DOSE}</proof><answer>It is 7 mg.</answer>",
            f"<think>It says so.</think><proof>{DOSE}</proof><answer>It is 8 mg.</answer>",
            "It is 7 mg.",
        ),
    ),
}
"""Servers: what is installed for each, its settings, and what the policy says."""
SERVE = """
import json, os, subprocess, sys, uvicorn
which, port = sys.argv[1], int(sys.argv[2])
if which == "made by openenv init":
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_room", "--output-dir", "."],
                   check=True, stdout=subprocess.DEVNULL)
    sys.path.insert(0, ".")
    from echo_room.server.app import app
elif which == "korrel":
    from korrel.exporters.openenv import build_environment_class
    from korrel.persona import Persona
    from korrel.rubric import Rubric
    from korrel.scenario import Scenario
    from openenv.core.env_server import Action, Observation, create_fastapi_app

    class Says(Persona):
        def next_message(self, messages):
            return "And now?"

    class Reply(Action):
        content: str = ""
        tool_calls: list = []

    class Told(Observation):
        messages: list = []

    def part_that_knows(completion, info):
        said = [one.content for one in completion if one.role == "assistant"]
        return sum(info["price"] in one for one in said) / max(1, len(said))

    scenario = Scenario(id="price", system="Sell it.", persona=Says(goal="buy"), max_turns=3,
                        opening_message="What does it cost?", info={"price": "7"},
                        rubric=Rubric([part_that_knows]))
    made = build_environment_class(scenario, Told, Reply)
    app = create_fastapi_app(made, Reply, Told)
else:
    asked = f"<context>{sys.argv[3]}</context><question>What is the dose?</question>"
    rows = [{"role": "user", "content": asked + "PROOF:\\nIt is 7 mg."},
            {"role": "assistant", "content": "It is 7 mg."}]
    with open("rows.jsonl", "w") as file:
        print(json.dumps({"messages": rows}), file=file)
    os.environ["DIPG_DATASET_PATH"] = "rows.jsonl"
    sys.argv = sys.argv[:1]
    from med_safety_gym.app import app
uvicorn.run(app, port=port, log_level="warning")
"""
OPENENV_ITSELF = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
url, field, rollouts = json.loads(sys.argv[1])

async def play(seed, replies):
    async with GenericEnvClient(base_url=url) as client:
        await client.reset(seed=seed)
        total = 0.0
        for reply in replies:
            result = await client.step({field: reply})
            total += result.reward or 0.0
            if result.done:
                break
        return total

async def main():
    return {name: await play(int(name.removeprefix("seed-")), replies)
            for name, replies in rollouts.items()}

print(json.dumps(asyncio.run(main())))
"""
REASONING = ("chain_sum", "leg_counting", "letter_counting")
GYM_ITSELF = """
import json, sys, gymnasium
name, words, rollouts = json.loads(sys.argv[1])
rewards = {}
for rollout, replies in rollouts.items():
    game = gymnasium.make(name)
    game.reset(seed=int(rollout.removeprefix("seed-")))
    total = 0.0
    for reply in replies:
        _, gained, is_over, is_cut, _ = game.step(words.index(reply))
        total += float(gained)
        if is_over or is_cut:
            break
    rewards[rollout] = total
print(json.dumps(rewards))
"""
TEXTARENA_ITSELF = """
import json, sys, textarena
name, rollouts = json.loads(sys.argv[1])
rewards = {}
for rollout, replies in rollouts.items():
    game = textarena.make(f"{name}-raw")
    game.reset(num_players=1, seed=int(rollout.removeprefix("seed-")))
    rewards[rollout] = 0.0
    for reply in replies:
        game.get_observation()
        is_over, _ = game.step(action=reply)
        if is_over:
            rewards[rollout] = float(game.close()[0][0])
            break
print(json.dumps(rewards))
"""
INSPECT_ITSELF = """
import json, os, sys, tempfile
name, scorer, url, number = json.loads(sys.argv[1])
os.environ.update(PUBLISHED_BASE_URL=url, PUBLISHED_API_KEY="none")
from inspect_ai import eval
from inspect_ai.scorer import value_to_float
[log] = eval(name, model="openai-api/published/tools", limit=number, log_dir=tempfile.mkdtemp())
assert log.status == "success", log.error
scorer, key = scorer.split("/")
print()
print(json.dumps({str(s.id): value_to_float()(s.scores[scorer].value[key]) for s in log.samples}))
"""
REASONING_ITSELF = """
import json, sys, reasoning_gym
task, seed, rollouts = json.loads(sys.argv[1])
entries = {one["question"].strip(): one
           for one in reasoning_gym.create_dataset(task, seed=seed, size=1000)}
print(json.dumps({name: reasoning_gym.get_score_answer_fn(task)(answer, entries[question])
                  for name, (question, answer) in rollouts.items()}))
"""


def first_seed(task: str) -> int:
    """Return the seed of the first questions of a task, which are drawn in chunks."""
    return int.from_bytes(hashlib.sha256(f"0/{task}/0".encode()).digest()[:4])


@cache
def golds(task: str) -> dict[str, str]:
    """Return the answers of a task by question."""
    create = importlib.import_module("reasoning_gym.factory").create_dataset
    entries = create(task, seed=first_seed(task), size=1000)
    return {one["question"].strip(): one["answer"] for one in entries}


async def answer(body: dict[str, Any], choose: Choose) -> dict[str, Any]:
    """Return the message with which the policy, whose name says what it may do, replies."""
    users = [one["content"] for one in body["messages"] if one["role"] == "user"]
    first = users[0] if isinstance(users[0], str) else users[0][0]["text"]
    if body["model"] in REASONING:
        gold = golds(body["model"])[first.rpartition("\n\n")[0]]
        return {"content": f"<answer>{await choose((gold, '0'))}</answer>"}
    if body["model"] != "tools":
        # What was chosen is in the rollout, which is what the other side is given.
        return {"content": await choose(json.loads(body["model"]))}
    turn = sum(one["role"] == "assistant" for one in body["messages"])
    tools = body.get("tools") or []
    if turn >= min(3, len(tools)):
        told = [str(one["content"]) for one in body["messages"] if one["role"] == "tool"]
        return {"content": " ".join(told) or "I do not know."}
    about = tools[turn]["function"]
    words = re.findall(r"[a-zA-Z]{4,}", first) or ["it"]
    arguments = {
        key: await choose(one.get("enum", words), seed=zlib.crc32(f"{first}/{turn}/{key}".encode()))
        for key, one in about["parameters"].get("properties", {}).items()
    }
    called = {"name": about["name"], "arguments": json.dumps(arguments)}
    return {
        "content": "",
        "tool_calls": [{"id": f"call-{turn}", "type": "function", "function": called}],
    }


async def evaluated(url: str, name: str, policy: str, folder: Path, *options: str):
    """Play `name` by the command; returns the reward and the messages of each example."""
    told = ("--examples", str(NUM_EXAMPLES), "--rollouts", "1", "--output", str(folder))
    done = await asyncio.to_thread(
        telescope, "eval", name, "--base-url", url, "--model", policy, *told, *options
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_EXAMPLES
    return {row["example_id"]: (row["reward"], row["messages"]) for row in rows}


def replies_in(rows) -> dict[str, list[str]]:
    return {
        name: [one["content"] for one in messages if one["role"] == "assistant"]
        for name, (_, messages) in rows.items()
    }


def rewards_in(rows) -> dict[str, float]:
    return {name: reward for name, (reward, _) in rows.items()}


def linked(scheme: str, one: Published) -> str:
    packages = [part for package in one.packages for part in ("--with", package)]
    return link(f"{scheme}:{one.id}", *packages, "--settings", json.dumps(one.settings))


@pytest.mark.parametrize("one", GYM, ids=lambda one: one.id)
async def test_games_of_gymnasium(one, model_server, tmp_path):
    python = linked("gym", one)
    async with model_endpoint(model_server, answer) as url:
        rows = await evaluated(url, f"gym:{one.id}", json.dumps(one.moves), tmp_path / "eval")
    asked = json.dumps([one.id, WORDS[one.id], replies_in(rows)])
    assert rewards_in(rows) == by_itself(python, GYM_ITSELF, asked)


@pytest.mark.parametrize("one", TEXTARENA, ids=lambda one: one.id)
async def test_games_of_textarena(one, model_server, tmp_path):
    python = linked("textarena", one)
    async with model_endpoint(model_server, answer) as url:
        name = f"textarena:{one.id}"
        rows = await evaluated(url, name, json.dumps(one.moves), tmp_path / "eval")
    assert rewards_in(rows) == by_itself(
        python, TEXTARENA_ITSELF, json.dumps([one.id, replies_in(rows)])
    )


@pytest.mark.parametrize("one", INSPECT, ids=lambda one: one.id)
async def test_tasks_of_inspect(one, model_server, tmp_path):
    python = linked("inspect", one)
    async with model_endpoint(model_server, answer) as url:
        rows = await evaluated(url, f"inspect:{one.id}", "tools", tmp_path / "eval")
        asked = json.dumps([one.id, one.settings["scorer"], url, NUM_EXAMPLES])
        theirs = await asyncio.to_thread(by_itself, python, INSPECT_ITSELF, asked)
    assert {name: rewards_in(rows)[name] for name in theirs} == theirs


@contextmanager
def serving(python: str, which: str, folder: Path):
    """Yield the address of a server once it answers."""
    port = free_port()
    folder.mkdir()
    server = subprocess.Popen([python, "-c", SERVE, which, str(port), DOSE], cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        by_itself(sys.executable, WAIT, f"{url}/health")
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("which", SERVERS)
async def test_servers_of_openenv(which, model_server, tmp_path):
    packages, settings, moves = SERVERS[which]
    python = str(environment_for("openenv", packages).python)
    with serving(python, which, tmp_path / "server") as address:
        link(f"openenv:{address}", "--settings", json.dumps(settings))
        async with model_endpoint(model_server, answer) as url:
            rows = await evaluated(url, f"openenv:{address}", json.dumps(moves), tmp_path / "eval")
        field = {"korrel": "content", "openenv-dipg-safety": "llm_response"}.get(which, "message")
        asked = json.dumps([address, field, replies_in(rows)])
        theirs = await asyncio.to_thread(by_itself, python, OPENENV_ITSELF, asked)
    assert rewards_in(rows) == theirs


@pytest.mark.parametrize("task", REASONING)
async def test_tasks_of_reasoning_gym(task, model_server, tmp_path):
    done = telescope("env", "link", str(REASONING_GYM))
    assert done.returncode == 0, done.stderr
    async with model_endpoint(model_server, answer) as url:
        options = ("--env.task", task)
        rows = await evaluated(url, "reasoning-gym", task, tmp_path / "eval", *options)
    asked = {
        name: (
            messages[0]["content"].rpartition("\n\n")[0],
            re.fullmatch(r"<answer>(.*)</answer>", messages[-1]["content"])[1],
        )
        for name, (_, messages) in rows.items()
    }
    told = json.dumps([task, first_seed(task), asked])
    theirs = by_itself(sys.executable, REASONING_ITSELF, told)
    assert rewards_in(rows) == theirs
