"""Environments of verifiers as others published them: linked, evaluated, and scored as they do.

A model on vLLM plays, and says the same to a question again. Rewards of `telescope eval` must be
those of their own `generate` or run of a taskset, which ask the same model.
"""

import asyncio
import json
import re
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.linking import (
    ASKS_ONCE,
    Choose,
    by_itself,
    link,
    model_endpoint,
    telescope,
)

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("home")]
NUM_EXAMPLES = 12


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published environment."""

    id: str
    packages: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    replies: tuple[str, ...] = ()
    """What the model may say; empty = the sum of a question's numbers, or the first."""


CLAIMS = "<claim>The witness says so.</claim> <cite>The witness</cite> "
POEM = "Snow on the old road\nA crow calls, and then nothing\nThe river is cold\n"
OLD = (
    Published(
        id="sophistry_bench_sprint",
        packages=("sophistry-bench-sprint",),
        replies=("It is so.", CLAIMS, CLAIMS * 8, CLAIMS * 20),
    ),
    Published(
        id="stardata.envs.constraint_gym",
        packages=("staros-stardata",),
        replies=(POEM, POEM * 2, "I\nam\nhere\nnow", "A man, a plan, a canal: Panama"),
    ),
    Published(
        id="falsepass._demo.falsepass_toy_env",
        packages=("falsepass",),
    ),
)
LAYOUT = '```json\n[{"kind": "%s", "x": %d, "y": %d, "rot": %d}]\n```'
KINDS = ("ladder", "spring", "drum", "block", "bell")
NEW = tuple(
    Published(
        id="marble_v1",
        packages=("marble-v1", "verifiers==0.4.0"),
        settings={"max_tasks": 40, "options": options},
        replies=(
            "I cannot say.",
            *(LAYOUT % (kind, x, -600, 0) for kind in KINDS for x in (-120, 0, 120)),
        ),
    )
    for options in ({}, {"ring_half_width": 900.0}, {"pieces": 2})
)
OLD_ITSELF = """
import asyncio, json, os, sys
import verifiers as vf
name, options, url, model, ids = json.loads(sys.argv[1])
os.environ["PUBLISHED_KEY"] = "none"
env = vf.load_environment(name, **options)
rows = [dict(row) for row in env.get_dataset() if f"train-{row['example_id']}" in ids]
client = vf.ClientConfig(api_base_url=url, api_key_var="PUBLISHED_KEY")
done = asyncio.run(env.generate(rows, client, model, sampling_args={"max_tokens": 64}))
print()
print(json.dumps({f"train-{one['example_id']}": one["reward"] for one in done["outputs"]}))
"""
NEW_SOLVED = """
import itertools, json, sys
from verifiers.v1.utils.loaders import taskset_class
name, options = json.loads(sys.argv[1])
kind = taskset_class(name)
from marble_v1.taskset import MarbleConfig
tasks = itertools.islice(iter(kind(MarbleConfig.model_validate({**options, "id": name}))), 40)
print()
print(json.dumps({task.data.prompt: f"```json\\n{json.dumps(task.data.solution)}\\n```"
                  for task in tasks}))
"""
"""The layouts that its tasks were built from."""
NEW_ITSELF = f"""{ASKS_ONCE}
import asyncio, itertools, json
name, options, url, model, ids = json.loads(sys.argv[1])

async def main():
    env = load({{**options, "id": name}})
    context = vf.ModelContext(model=model,
        client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    rewards = {{}}
    async with env.serving():
        for index, task in enumerate(itertools.islice(iter(env.taskset), 40)):
            if (key := f"{{index}}-{{task.key[:16]}}") in ids:
                [trace] = (await env.run_episode(task, context)).traces
                rewards[key] = trace.reward
    return rewards

found = asyncio.run(main())
print()
print(json.dumps(found))
"""


async def answer(known: dict[str, str], body: dict[str, Any], choose: Choose) -> dict[str, Any]:
    """Return the message of a policy whose name is the list of its replies.

    Of the questions that it knows the answers of, it answers about a half.
    """
    question = str(body["messages"][-1]["content"])
    draw = zlib.crc32(question.encode())
    if question in known and draw % 2:
        return {"content": known[question]}
    numbers = re.findall(r"\d+", question)
    said = [f"<answer>{number}</answer>" for number in (sum(map(int, numbers)), *numbers[:1])]
    return {"content": await choose(json.loads(body["model"]) or said, seed=draw)}


async def both(one: Published, program: str, server: str, folder: Path) -> tuple[dict, dict]:
    """Return our rewards and theirs by the ids of examples."""
    name, model = f"verifiers:{one.id}", json.dumps(one.replies)
    packages = [part for package in one.packages for part in ("--with", package)]
    settings = ("--settings", json.dumps(one.settings))
    python = await asyncio.to_thread(link, name, *packages, *settings)
    played = ("--examples", str(NUM_EXAMPLES), "--rollouts", "1", "--split", "train")
    options = one.settings.get("options", {})
    known = {}
    if one in NEW:
        told = json.dumps([one.id, options])
        known = await asyncio.to_thread(by_itself, python, NEW_SOLVED, told)
    async with model_endpoint(server, partial(answer, known)) as url:
        asked = ("eval", name, "--base-url", url, "--model", model, *played)
        done = await asyncio.to_thread(telescope, *asked, "--output", str(folder))
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
        ours = {row["example_id"]: row["reward"] for row in rows}
        told = json.dumps([one.id, options, url, model, list(ours)])
        theirs = await asyncio.to_thread(by_itself, python, program, told)
    assert len(ours) == NUM_EXAMPLES
    return ours, theirs


@pytest.mark.parametrize("one", OLD, ids=lambda one: one.id)
async def test_environments(one, model_server, tmp_path):
    ours, theirs = await both(one, OLD_ITSELF, model_server, tmp_path / "eval")
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert len(set(theirs.values())) > 1


@pytest.mark.parametrize("one", NEW, ids=lambda one: json.dumps(one.settings["options"]))
async def test_tasksets(one, model_server, tmp_path):
    ours, theirs = await both(one, NEW_ITSELF, model_server, tmp_path / "eval")
    assert ours == theirs
    assert set(theirs.values()) == {0.0, 1.0}


def test_what_a_published_package_lacks_is_named():
    """It imports a module that its own wheel does not have."""
    done = telescope(
        "env", "link", "verifiers:stardata.envs.sokoban_gym", "--with", "staros-stardata"
    )
    assert done.returncode == 3
    assert "No module named 'stardata.puzzles'" in done.stderr
    assert "sokoban_gym.py, line" in done.stderr


def test_a_package_that_needs_an_old_version_gets_it():
    """Its games are on a server, whose address it reads from a variable."""
    used = ("env", "link", "verifiers:catapult_verifiers", "--with", "catapult-verifiers")
    done = telescope(*used, "--allow-sdist", "wget")
    assert done.returncode == 3
    assert "catapult_verifiers cannot be loaded" in done.stderr
    assert "--secret FACADE_URL" in done.stderr
