"""Gradients that are taken while a batch is still being sampled are those of the whole batch."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.types import RolloutStatus
from telescope_train.algorithms import known_algorithms, load_algorithm
from telescope_train.algorithms.record import Algorithm
from telescope_train.batches.packing import Packing
from telescope_train.batches.weighting import denominator, numerators, token_weights
from telescope_train.loop import train
from telescope_train.observability.timeline import UNRECORDED, Timeline
from telescope_train.plan.checks.step import step_problems
from telescope_train.rollouts.sampler import RolloutSampler
from telescope_train.step.metrics import _SPANS
from telescope_train.step.stream_rules import (
    how_gradients_are_taken,
    needs_whole_batch,
    streams_gradients,
)
from telescope_train.step.streaming import FULL, full_rounds

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_run import ToyPolicies, toy_config, toy_parts

STREAMED = [name for name in known_algorithms() if load_algorithm(name).compares == "group"]


def config_of(tiny, *, shares=False, **algorithm):
    """Return settings of a run in float64 with batches of a few samples, so that there are many."""
    config = toy_config(tiny, steps=2, **algorithm)
    model = config.model.model_copy(
        update={"model_dtype": "float64", "mixed_precision_dtype": "float64"}
    )
    # At rate 0 both runs have the same weights in every step; Adam would blow rounding up.
    # Where nothing is shared, a rank need not try it at its start.
    sharing = "auto" if shares else False
    changes = {"seq_len": 32, "learning_rate": 0.0, "share_prefixes": sharing}
    trainer = config.trainer.model_copy(update=changes)
    return config.model_copy(update={"model": model, "trainer": trainer})


class Shuffled(RolloutSampler):
    """Groups end one at a time, in another order than they were drawn."""

    async def finished(self, batch):
        groups = [group async for some in RolloutSampler.finished(self, batch) for group in some]
        for index in np.random.default_rng(batch).permutation(len(groups)):
            yield [groups[index]]


async def trained(
    config, folder, start, *, streams: bool, shares=False, prompt_tokens=5, timeline=UNRECORDED
):
    """Return the gradient of each step, by name, and the rows of metrics."""
    policies = ToyPolicies(prompt_tokens=prompt_tokens)
    parts = await toy_parts(config, folder, start, policies=policies)
    backend = parts.trainer.worker.backend
    gradients, apply = [], backend.apply_gradient

    def noted(scale=1.0):
        gradient = backend.export_gradient()
        gradients.append({name: scale * value.double().numpy() for name, value in gradient})
        return apply(scale)

    backend.apply_gradient = noted
    parts.sampler.__class__ = Shuffled if streams else RolloutSampler
    packing = replace(parts.packing, seq_len=32, share_prefixes=shares)
    parts = replace(parts, streams_gradients=streams, packing=packing, timeline=timeline)

    async def after_step(step, row):
        return None

    await train(parts, after_step=after_step)
    await parts.sampler.close()
    return gradients, parts.folder.metrics()


def require_same_facts(streamed, whole, step) -> None:
    """Assert that the records of tokens do not tell how the gradient was taken."""
    found = {(row.group_id, row.index, row.turn): row for row in streamed.token_facts(step)}
    expected = list(whole.token_facts(step))
    assert [(row.group_id, row.index, row.turn) for row in expected] == list(found)
    for row in expected:
        other = found[row.group_id, row.index, row.turn]
        assert other.weight == pytest.approx(row.weight)
        assert list(other.logprobs) == pytest.approx(list(row.logprobs), rel=1e-5)
        for name in ("entropy", "effective_advantages"):
            assert list(getattr(other, name)) == pytest.approx(list(getattr(row, name)), rel=2e-3)
    trained = {(row.group_id, row.index) for row in expected}
    kept = [row for row in whole.rollouts([step]) if row.status is RolloutStatus.KEPT]
    assert trained == {(row.group_id, row.index) for row in kept}


CASES = [
    *({"algorithm": name} for name in STREAMED),
    {"use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch"},
    {"use_ppo_clip": True, "use_decoupled_loss": True, "kl_penalty_tau": 0.1},
    {"kl_penalty_tau": 0.1, "kl_in_reward": True},
    {"filter_overlong": True, "overlong_penalty_factor": 0.5, "overlong_buffer_tokens": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(case, marks=[] if case == {"algorithm": "grpo"} else pytest.mark.slow)
        for case in CASES
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
async def test_gradient_and_metrics_are_those_of_the_whole_batch(
    tiny, tiny_of_quickstart, start, tmp_path, algorithm
):
    if load_algorithm(algorithm.get("algorithm", "grpo")).needs_reference:
        algorithm = {**algorithm, "reference_model": str(tiny_of_quickstart)}
    config = config_of(tiny, **algorithm)
    assert streams_gradients(config)
    whole, expected = await trained(config, tmp_path / "whole", start, streams=False)
    found, rows = await trained(config, tmp_path / "streamed", start, streams=True)
    assert len(found) == len(whole) == 2
    for gradient, other in zip(found, whole, strict=True):
        for name, value in other.items():
            assert np.linalg.norm(gradient[name] - value) < 1e-13 * np.linalg.norm(value), name
    left_out = ("time", "mfu", "tokens/", "packing", "queue/", "gradient/")
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys() | {"gradient/early_fraction"}
        for name in other:
            if not name.startswith(left_out):
                assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
        assert row["tokens/trained"] == other["tokens/trained"]
    for step in (1, 2):
        require_same_facts(
            *(RunFolder.open(tmp_path / name) for name in ("streamed", "whole")), step
        )


@pytest.mark.slow
@pytest.mark.parametrize("streams", [True, False])
async def test_credit_and_packing_are_told_apart_from_the_work_of_the_ranks(
    tiny, start, tmp_path, streams
):
    spans = []
    config = config_of(tiny, kl_penalty_tau=0.1, kl_in_reward=True)
    timeline = Timeline(spans.append)
    _, rows = await trained(config, tmp_path, start, streams=streams, timeline=timeline)
    for row in rows:
        assert row["time/wait_s"] > 0
        assert row["time/train_s"] > 0
        for lap, name in _SPANS.items():
            told = [one.duration_s for one in spans if (one.step, one.name) == (row["step"], name)]
            assert sum(told) == pytest.approx(row[f"time/{lap}_s"])


@pytest.mark.slow
async def test_groups_that_share_their_prompt_can_be_streamed(tiny, start, tmp_path):
    """What parts of a batch share is computed once; the gradient stays that of the whole."""
    config = config_of(tiny, shares=True)
    whole, expected = await trained(
        config, tmp_path / "whole", start, streams=False, prompt_tokens=20
    )
    found, rows = await trained(
        config, tmp_path / "streamed", start, streams=True, shares=True, prompt_tokens=20
    )
    for gradient, other in zip(found, whole, strict=True):
        for name, value in other.items():
            assert np.linalg.norm(gradient[name] - value) < 1e-13 * np.linalg.norm(value), name
    for row, other in zip(rows, expected, strict=True):
        assert row["gradient/early_fraction"] > 0
        assert row["pack/shared_fraction"] > 0
        assert row["tokens/trained"] == other["tokens/trained"]
    for step in (1, 2):
        require_same_facts(
            *(RunFolder.open(tmp_path / name) for name in ("streamed", "whole")), step
        )


@pytest.mark.slow
async def test_parts_of_the_gradient_are_taken_before_the_batch_is_complete(tiny, start, tmp_path):
    """The second half of the batch ends only after the ranks have had something of the first."""
    parts = await toy_parts(config_of(tiny), tmp_path / "run", start)
    had_some = asyncio.Event()
    accumulate = parts.trainer.accumulate_gradient

    async def noted(shards, version):
        await accumulate(shards, version)
        had_some.set()

    class Halves(RolloutSampler):
        async def finished(self, batch):
            groups = [g async for some in RolloutSampler.finished(self, batch) for g in some]
            had_some.clear()
            yield groups[:3]
            async with asyncio.timeout(300):
                await had_some.wait()
            yield groups[3:]

    parts.sampler.__class__ = Halves
    parts.trainer.accumulate_gradient = noted
    parts = replace(parts, streams_gradients=True, packing=replace(parts.packing, seq_len=16))

    async def after_step(step, row):
        return None

    await train(parts, after_step=after_step)
    await parts.sampler.close()
    early = [row["gradient/early_fraction"] for row in parts.folder.metrics()]
    assert len(early) == 2
    assert min(early) > 0


@pytest.mark.slow
async def test_an_algorithm_that_looks_at_the_whole_batch_after_all_is_refused(
    tiny, start, tmp_path
):
    parts = await toy_parts(config_of(tiny), tmp_path / "run", start)

    def by_batch(rewards_N, groups_N, norm):
        return load_algorithm("reinforce_pp").advantage(rewards_N, groups_N, norm)

    false = replace(parts.rules.algorithm, name="mine", advantage=by_batch, compares="group")
    parts.sampler.__class__ = Shuffled
    parts = replace(parts, streams_gradients=True, rules=replace(parts.rules, algorithm=false))

    async def after_step(step, row):
        return None

    with pytest.raises(ConfigError, match=r"\bmine\b.*compares = .batch."):
        await train(parts, after_step=after_step)
    await parts.sampler.close()
    assert parts.trainer.num_steps == 0


@settings(max_examples=80)
@given(
    st.lists(st.integers(2, 40), max_size=40),
    st.integers(1, 4),
    st.sampled_from([40, 64, 100]),
)
def test_only_full_batches_for_all_ranks_are_taken_early(make_sample, lengths, ranks, seq_len):
    samples = [make_sample(1, length - 1, rollout=n) for n, length in enumerate(lengths)]
    packing = Packing(seq_len=seq_len, num_ranks=ranks, hidden_size=64, max_tokens=8)
    chosen = full_rounds(samples, packing)
    assert len(set(chosen)) == len(chosen)
    total = sum(lengths[index] for index in chosen)
    assert total == 0 or total >= FULL * seq_len * ranks


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=9),
    st.sampled_from(["token", "sequence", "constant"]),
)
def test_numerators_of_parts_over_the_denominator_of_all_are_the_weights(
    make_sample, rollouts, weighting
):
    parts = [
        [make_sample(2, length, rollout=number) for length in chains]
        for number, chains in enumerate(rollouts)
    ]
    samples = [sample for part in parts for sample in part]
    whole = token_weights(samples, weighting, max_tokens=9)
    total = denominator(samples, weighting, max_tokens=9)
    found = np.concatenate([numerators(part, weighting) for part in parts]) / total
    np.testing.assert_allclose(found, whole, rtol=1e-12)
    trained = np.array([np.count_nonzero(sample.mask) for sample in samples])
    if weighting != "constant":
        assert (whole * trained).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"algorithm": "reinforce_pp"}, "compares each reward with the whole batch"),
        ({"algorithm": "reinforce_pp_baseline"}, "compares each reward with the whole batch"),
        ({"advantage_norm": "batch"}, "advantage_norm"),
        ({"number_of_minibatches": 2}, "number_of_minibatches"),
        ({"ppo_epochs": 2, "use_ppo_clip": True}, "ppo_epochs"),
    ],
)
def test_what_needs_the_whole_batch_is_said(tiny, algorithm, reason):
    config = toy_config(tiny, **algorithm)
    assert reason in needs_whole_batch(config)
    assert not streams_gradients(config)
    assert reason in how_gradients_are_taken(config)
    asked = config.scheduling.model_copy(update={"stream_gradients": True})
    problems = list(step_problems(config.model_copy(update={"scheduling": asked})))
    assert any("stream_gradients cannot be true" in one and reason in one for one in problems)


def test_streaming_can_be_turned_off(tiny):
    config = toy_config(tiny)
    assert streams_gradients(config)
    assert "as groups end" in how_gradients_are_taken(config)
    off = config.scheduling.model_copy(update={"stream_gradients": False})
    config = config.model_copy(update={"scheduling": off})
    assert not streams_gradients(config)
    assert "stream_gradients is false" in how_gradients_are_taken(config)


def test_seeds_of_requests_are_for_runs_that_repeat(tiny):
    """Which group ends first depends on the clock, and with it the order of the sums."""
    config = toy_config(tiny)
    seeded = config.rollout.model_copy(update={"seed_sampling": True})
    config = config.model_copy(update={"rollout": seeded})
    assert not streams_gradients(config)
    assert "seed_sampling" in how_gradients_are_taken(config)
    asked = config.scheduling.model_copy(update={"stream_gradients": True})
    assert streams_gradients(config.model_copy(update={"scheduling": asked}))


def test_an_algorithm_of_ones_own_compares_with_the_batch_unless_it_says_otherwise():
    assert Algorithm.__dataclass_fields__["compares"].default == "batch"
