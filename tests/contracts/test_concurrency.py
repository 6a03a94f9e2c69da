"""64 concurrent episodes of every first-party environment end like the same ones, one at a time."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.asking import ask
from tests.contracts.test_environments import CASES as ANSWERED
from tests.contracts.test_environments import INTERACTIVE

from telescope_core import Rollout, RolloutStatus, Sampling, Split
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

ROOT = Path(__file__).parents[2] / "packages" / "telescope-envs" / "environments"
CASES = [*ANSWERED, *INTERACTIVE]
NUM_EXAMPLES = 8
NUM_SCRIPTS = 8


ELSEWHERE = {"humaneval", "swe-small"}
"""What they grade takes a sandbox for each rollout. Their release was tried 64 at once by the check
`reward.concurrency` of `telescope env validate`; `test_all_first_party` asks for its verdict."""


def test_every_first_party_environment_is_tried():
    # Those that read a dataset of a Hub are tried on rows like its own, in tests/environments.
    own = [path for path in ROOT.iterdir() if not (path / "fixture-rows").exists()]
    modules = {module.name for path in own for module in path.glob("src/*")}
    elsewhere = {module.name for name in ELSEWHERE for module in (ROOT / name).glob("src/*")}
    assert modules - elsewhere == {factory.partition(":")[0] for factory, _ in CASES}


def scripts(golds: list[list[str]]) -> list[list[str]]:
    """Return what the policy says in each episode, right and wrong, in up to 3 turns."""
    rng = random.Random(0)
    noise = ["", "I do not know.", "7", "<answer>1+1</answer>", "<tool_call>{", "\\boxed{1}"]
    said: list[list[str]] = []
    for number in range(NUM_EXAMPLES * NUM_SCRIPTS):
        own = golds[number % NUM_EXAMPLES]
        other = rng.choice(golds)
        wrong = [rng.choice([*noise, *other]) for _ in range(rng.randrange(3))]
        said.append([*wrong, *own] if number % 2 else [*own, *wrong])
    return said


def outcome(rollout: Rollout) -> tuple[object, ...]:
    return (
        *(rollout.example_id, rollout.status, rollout.error, rollout.stop_reason),
        *(rollout.reward, rollout.rewards, rollout.metrics, rollout.tags, rollout.info),
        *(rollout.messages, rollout.golden_answers),
    )


async def episodes(factory: str, settings: dict, *, at_once: int) -> list[tuple[object, ...]]:
    environment = load_environment_class(factory).from_settings(settings)
    client = InProcessEnvironment(environment, name="it")
    golds = [await client.gold(Split.EVAL, index) for index in range(NUM_EXAMPLES)]
    texts = [[m.content for m in gold.messages if m.role == "assistant"] for gold in golds if gold]
    assert len(texts) == NUM_EXAMPLES, "every example has a gold answer"
    slots = asyncio.Semaphore(at_once)

    async def episode(number: int, replies: list[str]) -> tuple[object, ...]:
        request = ask(
            split=Split.EVAL,
            example_index=number % NUM_EXAMPLES,
            group_id=f"g{number}",
            sampling=Sampling(max_tokens=16),
            deadline_s=600,
        )
        policy = ScriptedClient(replies, delay_s=0.001 if at_once > 1 else 0.0).policy("r")
        async with slots:
            return outcome(await client.play(request, policy))

    said = scripts(texts)
    ended = await asyncio.gather(*(episode(n, replies) for n, replies in enumerate(said)))
    await client.close()
    return list(ended)


def first_of_each() -> list:
    """Return every case, all but the first of each environment marked slow."""
    seen: set[str] = set()
    marked = []
    for factory, settings in CASES:
        marks = [pytest.mark.slow] if factory in seen else []
        marked.append(pytest.param(factory, settings, marks=marks))
        seen.add(factory)
    return marked


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "settings"), first_of_each())
async def test_many_episodes_at_once_end_like_one_at_a_time(factory, settings):
    together = await episodes(factory, settings, at_once=64)
    alone = await episodes(factory, settings, at_once=1)
    assert together == alone
    assert all(ended[1] is RolloutStatus.KEPT for ended in together)
    assert len({ended[4] for ended in together}) > 1, "right and wrong ones are paid differently"
