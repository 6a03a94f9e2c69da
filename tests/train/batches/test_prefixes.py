"""Samples that begin alike are found, bound together and planned; each still counts for itself."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_train.batches.binning import sample_costs
from telescope_train.batches.bundles import bundle_sizes
from telescope_train.batches.packing import Packing, pack, pack_with
from telescope_train.batches.prefixes import (
    prefix_order,
    row_costs,
    shared_among,
    without_short_branches,
)
from telescope_train.models.attention.prefixes import SharedRow
from telescope_train.models.facts import ModelFacts
from telescope_train.step.streaming import full_rounds
from telescope_train.step.throughput import training_flops

sys.path.insert(0, str(Path(__file__).parents[1]))
from prefix_trees import plain_batches, random_tree, sharing_all, tree_sample

SEEDS = st.integers(0, 10**6)
trees = st.builds(
    lambda seed, num, vocab: random_tree(np.random.default_rng(seed), num=num, vocab=vocab),
    SEEDS,
    st.integers(1, 30),
    st.sampled_from([2, 50]),
)


def common(one, other) -> int:
    """The slow, obvious number of tokens that two samples begin with."""
    number = 0
    while number < min(len(one), len(other)) and one.token_ids[number] == other.token_ids[number]:
        number += 1
    return number


@settings(max_examples=50)
@given(samples=trees)
def test_neighbors_in_the_order_share_the_most(samples):
    found = prefix_order(samples, min_tokens=1)
    ordered = [samples[index] for index in found.order_N]
    assert sorted(found.order_N.tolist()) == list(range(len(samples)))
    assert found.shared_N[0] == 0
    for place, sample in enumerate(ordered[1:], start=1):
        best = max(common(sample, before) for before in ordered[:place])
        assert found.shared_N[place] == common(sample, ordered[place - 1]) == best


@settings(max_examples=50)
@given(shared=st.lists(st.integers(0, 40), min_size=1, max_size=30), min_tokens=st.integers(1, 20))
def test_short_branches_are_cut_down_to_longer_ones(shared, min_tokens):
    shared_N = np.array([0, *shared])
    kept_N = without_short_branches(shared_N, min_tokens, min_saved=10**6)
    assert (kept_N <= shared_N).all()
    assert (shared_N - kept_N < min_tokens).all()
    # What is left of the tree: no two depths on one path are closer than that.
    for place, depth in enumerate(kept_N.tolist()):
        sides = kept_N[:place][::-1], kept_N[place + 1 :]
        around = [smaller for side in sides for smaller in _first_smaller(side, depth)]
        assert all(depth - smaller >= min_tokens for smaller in around)
    assert (without_short_branches(shared_N, 1) == shared_N).all()


def _first_smaller(values, depth):
    return [int(value) for value in values if value < depth][:1]


@settings(max_examples=50)
@given(shared=st.lists(st.integers(0, 9), min_size=1, max_size=12), data=st.data())
def test_samples_that_are_left_in_a_row_share_the_least_of_those_between(shared, data):
    shared_N = np.array([0, *shared])
    places = data.draw(st.sets(st.integers(0, len(shared))).map(sorted))
    expected = [min(shared_N[one + 1 : other + 1]) for one, other in pairwise(places)]
    found_N = shared_among(shared_N, np.array(places, np.int64))
    assert found_N.tolist() == ([0, *expected] if places else [])


@given(shared=st.integers(0, 4000), own=st.integers(1, 4000), hidden_size=st.integers(1, 8192))
def test_a_beginning_and_what_is_added_to_it_cost_what_the_whole_costs(shared, own, hidden_size):
    lengths_N = np.array([shared, shared + own])
    alone_N = sample_costs(lengths_N, hidden_size)
    assert row_costs(lengths_N, 0 * lengths_N, hidden_size).tolist() == alone_N.tolist()
    (added,) = row_costs(lengths_N[1:], lengths_N[:1], hidden_size)
    assert alone_N[0] + added == pytest.approx(alone_N[1])
    # A token that attends to n others takes 4 h n FLOPs for that, and 24 h^2 in the matrices.
    tokens_T = np.arange(shared, shared + own) + 0.5
    pairs, matrices = 4.0 * hidden_size * tokens_T.sum(), 24.0 * hidden_size**2 * own
    assert added == pytest.approx(own * (pairs + matrices) / matrices)


@settings(max_examples=40)
@given(samples=trees, seq_len=st.integers(72, 200), num_ranks=st.integers(1, 3), seed=SEEDS)
def test_every_sample_is_packed_once_with_its_own_columns(samples, seq_len, num_ranks, seed):
    weights_N = np.random.default_rng(seed).random(len(samples)) + 0.5
    options = {"seq_len": seq_len, "num_ranks": num_ranks, "hidden_size": 64}
    plain = rows_of(pack(samples, weights_N, **options))
    shards = pack(samples, weights_N, share_prefixes=True, **options)
    assert rows_of(shards) == plain
    assert len({len(shard) for shard in shards}) == 1
    for batch in [batch for shard in shards for batch in shard]:
        assert batch.num_computed_tokens <= seq_len
        assert not batch.behavior_logprobs_T[~batch.mask_T].any(), "no weight takes NaN away"
        if batch.shared_S is not None:
            assert batch.num_trained_tokens <= seq_len
            most_S = sharing_all(batch).shared_S
            assert most_S is not None
            assert (batch.shared_S <= most_S).all()
            assert (batch.shared_S == 0)[0]


def rows_of(shards) -> list[tuple]:
    """Everything that a batch says of each sample, in an order that packing does not change."""
    rows = []
    for batch in [batch for shard in shards for batch in shard if batch.num_tokens]:
        for sample, origin in enumerate(batch.origins):
            own = batch.sequence_ids_T == sample
            columns = (
                *(batch.token_ids_T, batch.positions_T, batch.mask_T, batch.behavior_logprobs_T),
                *(batch.advantages_T, batch.weights_T, batch.temperatures_T, batch.versions_T),
            )
            rows.append((repr(origin), *(tuple(column[own].tolist()) for column in columns)))
    return sorted(rows)


def group(num, *, prompt, completion, seed=0, head=0):
    """Samples of one prompt; the first `head` tokens are those of every group."""
    generator = np.random.default_rng(seed)
    begin = np.append(np.arange(head) % 7, generator.integers(90, size=prompt - head))
    samples = []
    for number in range(num):
        ids = np.append(begin, generator.integers(90, size=completion))
        mask = np.arange(len(ids)) >= prompt
        behavior = np.where(mask, -1.0, np.nan).astype(np.float32)
        sample = tree_sample(generator, ids, number)
        samples.append(replace(sample, mask=mask, behavior_logprobs=behavior))
    return samples


def test_a_prompt_is_computed_once_for_its_group():
    samples = [
        *group(16, prompt=512, completion=128),
        *group(16, prompt=512, completion=128, seed=1),
    ]
    (shard,) = pack(samples, np.ones(32), seq_len=4096, num_ranks=1, share_prefixes=True)
    computed = sum(batch.num_computed_tokens for batch in shard)
    assert computed == 2 * (512 + 16 * 128)
    assert sum(batch.num_tokens for batch in shard) == 32 * 640


@pytest.mark.parametrize("share_prefixes", [None, False, True])
def test_only_batches_with_common_beginnings_say_so_and_only_if_asked(share_prefixes):
    long = [group(1, prompt=500, completion=12, seed=seed)[0] for seed in range(3)]
    samples = [*group(4, prompt=100, completion=10, seed=9), *long]
    options = {} if share_prefixes is None else {"share_prefixes": share_prefixes}
    for batches in (
        pack(samples, np.ones(7), seq_len=512, num_ranks=1, **options),
        pack_with(
            samples,
            np.ones(7),
            Packing(seq_len=512, num_ranks=1, hidden_size=64, max_tokens=99, **options),
        ),
    ):
        shared = {len(b.origins): b.shared_S for shard in batches for b in shard}
        assert shared[1] is None
        assert (shared[4] is None) if not share_prefixes else shared[4].tolist() == [0, *[100] * 3]


def test_a_short_prompt_is_computed_once_where_many_have_it():
    few, many = group(3, prompt=8, completion=3), group(16, prompt=8, completion=3, seed=1)
    (shard,) = pack([*few, *many], np.ones(19), seq_len=4096, num_ranks=1, share_prefixes=True)
    assert sum(batch.num_shared_tokens for batch in shard) == 15 * 8
    assert without_short_branches(np.array([0, 4, 4, 4]), 16, min_saved=12).tolist() == [0, 4, 4, 4]
    assert not without_short_branches(np.array([0, 4, 4, 4]), 16, min_saved=13).any()


def test_ranks_do_not_wait_for_a_group_that_could_be_divided():
    samples = group(16, prompt=512, completion=128)
    shards = pack(samples, np.ones(16), seq_len=4096, num_ranks=4, share_prefixes=True)
    computed = [sum(batch.num_computed_tokens for batch in shard) for shard in shards]
    assert max(computed) <= 512 + 5 * 128  # where each had 4 * 640


@settings(max_examples=30)
@given(
    num_groups=st.integers(1, 6),
    size=st.integers(1, 9),
    prompt=st.integers(20, 90),
    completion=st.integers(1, 90),
    seq_len=st.integers(180, 1000),
    num_ranks=st.integers(1, 3),
)
def test_no_row_needs_more_memory_than_without_sharing(
    num_groups, size, prompt, completion, seq_len, num_ranks
):
    samples = [
        sample
        for seed in range(num_groups)
        for sample in group(size, prompt=prompt, completion=completion, seed=seed)
    ]
    options = {"seq_len": seq_len, "num_ranks": num_ranks, "hidden_size": 64}
    most = [
        max(b.num_computed_tokens + 0.25 * b.num_trained_tokens for shard in shards for b in shard)
        for shards in (
            pack(samples, np.ones(len(samples)), **options),
            pack(samples, np.ones(len(samples)), share_prefixes=True, **options),
        )
    ]
    assert most[1] <= most[0]


def test_what_all_groups_begin_with_is_shared_as_far_as_rows_hold_it():
    samples = [
        *group(4, prompt=300, completion=20, seed=1, head=200),
        *group(4, prompt=300, completion=20, seed=2, head=200),
    ]
    (shard,) = pack(samples, np.ones(8), seq_len=4096, num_ranks=1, share_prefixes=True)
    assert sum(batch.num_computed_tokens for batch in shard) == 200 + 2 * 100 + 8 * 20


def test_samples_that_share_nothing_are_packed_as_ever(make_sample):
    samples = [make_sample(3, 5 + number, rollout=number) for number in range(9)]
    one = pack(samples, np.ones(9), seq_len=30, num_ranks=2, hidden_size=64)
    other = pack_with(
        samples,
        np.ones(9),
        Packing(seq_len=30, num_ranks=2, hidden_size=64, max_tokens=9, share_prefixes=True),
    )
    assert rows_of(one) == rows_of(other)
    assert all(batch.shared_S is None for shard in other for batch in shard)


@settings(max_examples=30)
@given(samples=trees)
def test_bundles_hold_every_sample_once(samples):
    bundles = list(bundle_sizes(samples, seq_len=100))
    members = [index for _, one in bundles for index in one]
    assert sorted(members) == list(range(len(samples)))
    assert all(size <= 100 or len(one) == 1 for size, one in bundles)


def test_no_samples_fill_no_round():
    packing = Packing(seq_len=100, num_ranks=2, hidden_size=64, max_tokens=8, share_prefixes=True)
    assert list(bundle_sizes([], seq_len=100)) == []
    assert full_rounds([], packing) == []


@settings(max_examples=50)
@given(samples=trees, seed=SEEDS)
def test_a_row_is_a_tree_whose_parts_are_all_pairs_of_query_and_key(samples, seed):
    ((plain,),) = plain_batches(samples)
    batch = sharing_all(plain, sometimes=np.random.default_rng(seed))
    row = SharedRow(lengths_S=batch.lengths_S, shared_S=batch.shared_S)
    places, ends = row.places(), np.cumsum(row.lengths_S)
    ids = np.full(int(row.own_S.sum()), -1)
    ids[places] = batch.token_ids_T
    assert (ids[places] == batch.token_ids_T).all()
    expected = set()
    for start, end, own in zip(ends - row.lengths_S, ends, row.own_S, strict=True):
        path = places[start:end].tolist()
        assert len(set(path)) == len(path)
        for query in path[len(path) - own :]:
            expected |= {(query, key) for key in path[: len(path) - own]}
    found = [
        (query, key)
        for keys, queries in row.parts()
        for query in range(*queries)
        for key in range(*keys)
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert len(row.keys()) == int(row.lengths_S[row.own_S > 0].sum())


def test_flops_count_what_is_shared_once():
    facts = ModelFacts(
        num_parameters=None,
        vocab_size=100,
        max_positions=None,
        kv_values_per_token=None,
        num_body_parameters=1000,
        num_head_parameters=50,
        attention_width=8,
    )
    samples = group(2, prompt=30, completion=10)
    ((plain,),) = plain_batches(samples)
    shared = sharing_all(plain)
    saved = training_flops(facts, [plain]) - training_flops(facts, [shared])
    assert saved == 6.0 * (1000 * 30 + 8 * 30**2)
