"""The branches of an agent's rollouts, trained as one tree and one branch at a time."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE), str(HERE / "gateway")]
from agent_trees import play, three_compactions_and_two_sub_agents  # noqa: E402
from backend_cases import backend_settings  # noqa: E402

from telescope_train.batches.batch import TrainingSample  # noqa: E402
from telescope_train.batches.packing import end_to_end, pack  # noqa: E402
from telescope_train.batches.prefixes import prefix_order, row_costs  # noqa: E402
from telescope_train.batches.samples import samples_from_rollout  # noqa: E402
from telescope_train.batches.weighting import token_weights  # noqa: E402

pytestmark = pytest.mark.slow
HIDDEN = 128
STRATEGIES = ["none", "summarize", "drop_tool_results", "sliding_window"]


def gradient_of(worker, batches) -> torch.Tensor:
    for parameter in worker.backend._policy.parameters():
        parameter.grad = None
    worker.backend.accumulate_gradient(batches, version=0)
    return torch.cat([value.flatten() for _, value in worker.backend.export_gradient()])


def flops(batches) -> float:
    """Return the relative FLOPs of rows, in which what samples share is computed once."""
    shared = [
        np.zeros_like(one.lengths_S) if one.shared_S is None else one.shared_S for one in batches
    ]
    return sum(
        float(row_costs(one.lengths_S, shared_S, HIDDEN).sum())
        for one, shared_S in zip(batches, shared, strict=True)
    )


def least_flops(samples: list[TrainingSample]) -> float:
    """Return the FLOPs of the distinct tokens: each beginning that samples have, computed once."""
    order_N, shared_N = prefix_order(samples, min_tokens=1)
    lengths_N = np.array([len(samples[index]) for index in order_N.tolist()])
    return float(row_costs(lengths_N, shared_N, HIDDEN).sum())


async def test_a_tree_has_the_gradient_of_its_branches_one_at_a_time(tiny, start):
    """Three compactions and two sub-agents, every branch with an advantage of its own."""
    rollout, _, script = await play(
        three_compactions_and_two_sub_agents(0, size=90),
        context_strategy="summarize",
        max_context_tokens=880,
    )
    assert (script.num_summaries, len(script.delegated)) == (3, 2)
    samples = [
        replace(one, advantage=1.0 - 0.3 * number)
        for number, one in enumerate(samples_from_rollout(rollout, 0.0, 1.0))
    ]
    assert len(samples) == 6
    weights_N = token_weights(samples, "token", max_tokens=64)
    alone = [end_to_end([one], weights_N[[at]]) for at, one in enumerate(samples)]
    [tree] = pack(
        samples,
        weights_N,
        seq_len=sum(map(len, samples)),
        num_ranks=1,
        hidden_size=HIDDEN,
        share_prefixes=True,
    )
    assert flops(tree) <= 1.15 * least_flops(samples)
    assert flops(alone) > 1.5 * least_flops(samples)
    worker = start(backend_settings(tiny, dtype="float64"))
    expected, found = gradient_of(worker, alone), gradient_of(worker, tree)
    assert expected.norm() > 1e-3
    assert float((found - expected).norm() / expected.norm()) < 1e-12
    # In float32 the tree is as far from the truth as one branch at a time is: both about 1.6e-6.
    worker = start(backend_settings(tiny, dtype="float32"))
    of_tree, of_alone = ((gradient_of(worker, one) - expected).norm() for one in (tree, alone))
    assert of_tree <= 1.5 * of_alone
    assert of_alone <= 1e-5 * expected.norm()


COMMANDS = st.lists(
    st.sampled_from(["echo 1", "printf '%0200d' 3", "delegate a", "delegate b", "seq 60"]),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25)
@given(
    commands=COMMANDS,
    strategy=st.sampled_from(STRATEGIES),
    max_context_tokens=st.sampled_from([700, 900, 1200]),
    keep_turns=st.integers(1, 3),
    keep_thinking=st.booleans(),
    cut=st.randoms(use_true_random=False),
)
def test_each_sampled_token_is_trained_once_however_batches_are_made(
    commands, strategy, max_context_tokens, keep_turns, keep_thinking, cut
):
    rollout, pool, _ = asyncio.run(
        play(
            commands,
            context_strategy=strategy,
            max_context_tokens=max_context_tokens,
            keep_turns=keep_turns,
            keep_thinking=keep_thinking,
        )
    )
    samples = samples_from_rollout(rollout, 1.0, 1.0)
    sampled = np.sort(np.concatenate([found.logprobs for _, found in pool.answered]))
    assert len(set(sampled)) == len(sampled)
    weights_N = token_weights(samples, "token", max_tokens=64)
    order = list(range(len(samples)))
    cut.shuffle(order)
    at = cut.randrange(len(order) + 1)
    longest, whole = max(map(len, samples)), sum(map(len, samples))
    for seq_len, num_ranks, share in ((whole, 1, True), (longest, 2, True), (whole, 1, False)):
        batches = [
            batch
            for part in (order[:at], order[at:])
            for rank in pack(
                [samples[number] for number in part],
                weights_N[part],
                seq_len=seq_len,
                num_ranks=num_ranks,
                hidden_size=HIDDEN,
                share_prefixes=share,
            )
            for batch in rank
        ]
        trained = np.concatenate([one.behavior_logprobs_T[one.mask_T] for one in batches])
        np.testing.assert_array_equal(np.sort(trained), sampled.astype(np.float32))
        weight = sum(float(one.weights_T.sum()) for one in batches)
        assert weight == pytest.approx(1.0)
    [tree] = pack(
        samples, weights_N, seq_len=whole, num_ranks=1, hidden_size=HIDDEN, share_prefixes=True
    )
    assert flops(tree) <= 1.15 * least_flops(samples)
