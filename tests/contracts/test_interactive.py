"""The same contract for environments that answer the policy: whole rollouts, gold turn by turn."""

import random
from collections.abc import Sequence

import pytest
from tests.asking import ask
from tests.contracts.test_environments import INTERACTIVE, examples, opened

from telescope_core import Environment, Rollout, RolloutStatus, Sampling, Split
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

NUM_IDS = 20
each = pytest.mark.parametrize(("factory", "settings"), INTERACTIVE)


def gold_of(environment: Environment, index: int, split: Split = Split.EVAL) -> Sequence[str]:
    gold = environment.gold_answer(environment.examples(split).example(index))
    assert gold is not None
    return [gold] if isinstance(gold, str) else gold


async def played(environment: Environment, index: int, replies: Sequence[str]) -> Rollout:
    request = ask(
        split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=600
    )
    client = InProcessEnvironment(environment, name="it")
    rollout = await client.play(request, ScriptedClient(replies).policy("r"))
    assert rollout.status is RolloutStatus.KEPT, rollout.error
    return rollout


@each
def test_ids_are_unique_and_splits_disjoint_over_seeds(factory, settings):
    ids: dict[Split, set[str]] = {split: set() for split in Split}
    for seed in range(3):
        environment = opened(factory, {**settings, "seed": seed})
        for split in Split:
            own = {example.id for example in examples(environment, split, NUM_IDS)}
            assert len(own) == NUM_IDS, (split, seed)
            ids[split] |= own
    assert not ids[Split.TRAIN] & ids[Split.EVAL]


@each
async def test_gold_earns_the_maximum(factory, settings):
    environment = opened(factory, settings)
    for index in range(5):
        rollout = await played(environment, index, gold_of(environment, index))
        assert rollout.reward == pytest.approx(environment.reward_max), rollout.messages


@each
async def test_junk_stays_at_the_floor(factory, settings):
    environment = opened(factory, settings)
    rng = random.Random(0)
    for index in range(2):
        example = environment.examples(Split.EVAL).example(index)
        prompt = environment.initial_messages(example)[-1].content
        gold, other = gold_of(environment, index), gold_of(environment, index + 1)
        junk = [
            [""],
            [" \n\t "],
            [prompt],
            [f"<answer>{prompt}</answer>"],
            [f"<sorted>{prompt}</sorted>"],
            ["<answer></answer>"],
            ["<sorted></sorted>"],
            ["<answer>...</answer>"],
            ["".join(chr(rng.randrange(32, 127)) for _ in range(400))],
            ["x" * 100_000],
            ["<answer>" + "9" * 100_000 + "</answer>"],
            ["[" * 50_000],
            ["I do not know."],
            ["\u0663\u0664 \u2603 \u200b\U0001f600"],
        ]
        for replies in [*junk, *([other] if other[-1] != gold[-1] else [])]:
            rollout = await played(environment, index, replies)
            assert rollout.reward == environment.reward_min, f"{example.id}: {replies[0][:80]!r}"
