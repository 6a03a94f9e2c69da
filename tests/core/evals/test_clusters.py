"""Examples that depend on each other: intervals over clusters, from the example to the report."""

import math

import numpy as np
import pytest

from telescope_core import Example, ListSource, Sampling, SingleTurnEnvironment, metric, reward
from telescope_core.evals import EvalFolder, EvalSettings, compare_results, run_eval
from telescope_core.evals.comparison import paired_difference
from telescope_core.evals.folder import read_result, write_result
from telescope_core.evals.result import clusters_note
from telescope_core.evals.stats import mean_of_rewards, success_rate
from telescope_core.in_process import InProcessEnvironment
from telescope_core.reports.differences import sentence
from telescope_core.scripted import ScriptedClient


def drawn(rng, sizes, spread=1.5):
    """Return the chance of success of each task, and its cluster; clusters differ by `spread`."""
    logits = np.repeat(rng.normal(0.0, spread, len(sizes)), sizes)
    names = [f"c{index}" for index in np.repeat(np.arange(len(sizes)), sizes)]
    return 1.0 / (1.0 + np.exp(-logits)), names


@pytest.mark.parametrize("sizes", [[6] * 10, [5] * 40, [1, 9] * 15, [20] + [3] * 20])
def test_intervals_over_clusters_cover_and_those_over_tasks_do_not(sizes):
    rng = np.random.default_rng(0)
    held = apart = 0
    for _ in range(200):
        chances, names = drawn(rng, sizes)
        counts = [(2, int(one)) for one in rng.binomial(2, chances)]
        over = success_rate(counts, 1, every=False, clusters=names)
        alone = success_rate(counts, 1, every=False)
        assert over.mean == pytest.approx(alone.mean)
        assert (over.num_clusters, alone.num_clusters) == (len(sizes), 0)
        held += over.low <= 0.5 <= over.high
        apart += alone.low <= 0.5 <= alone.high
    assert held / 200 >= 0.91
    assert apart / 200 <= 0.8


def test_many_clusters_of_several_sizes_have_the_cluster_robust_standard_error():
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 9, 400)
    chances, names = drawn(rng, sizes)
    rewards = rng.uniform(0.0, 1.0, len(chances)) * chances
    found = mean_of_rewards([[float(one)] for one in rewards], clusters=names)
    # Miller 2024, "Adding Error Bars to Evals", equation 4: sums of residuals within clusters.
    sums = {}
    for name, one in zip(names, rewards, strict=True):
        sums[name] = sums.get(name, 0.0) + one - rewards.mean()
    error = math.sqrt(sum(one * one for one in sums.values())) / len(rewards)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.02)
    assert found.mean == pytest.approx(rewards.mean())


def test_clusters_of_one_task_and_nameless_ones_change_nothing():
    counts = [(4, one) for one in (0, 1, 4, 4, 2, 3)]
    alone = success_rate(counts, 2, every=False)
    assert success_rate(counts, 2, every=False, clusters=list("abcdef")) == alone
    assert success_rate(counts, 2, every=False, clusters=[""] * 6) == alone
    rewards = [[0.1, 0.3], [0.5], [0.9, 0.2]]
    assert mean_of_rewards(rewards, clusters=["a", "b", ""]) == mean_of_rewards(rewards)
    # Those that are left out leave the clusters of the others in place.
    some = success_rate([(1, 1), *counts], 2, every=True, clusters=["a", *"aabbcc"])
    assert (some.num_tasks, some.num_clusters) == (6, 3)
    one = success_rate(counts, 1, every=False, clusters=["a"] * 6)
    assert (one.low, one.high, one.num_clusters) == (None, None, 1)


def test_a_change_of_whole_clusters_is_no_difference_of_many_tasks():
    rng = np.random.default_rng(2)
    alarms = {True: 0, False: 0}
    for _ in range(200):
        chances, names = drawn(rng, [5] * 20)
        moved = 1.0 / (1.0 + np.exp(-np.repeat(rng.normal(0.0, 1.5, 20), 5)))
        before, after = (rng.binomial(4, one) / 4 for one in (chances, moved))
        for has_clusters in alarms:
            clusters = names if has_clusters else ()
            found = paired_difference("pass@1", before, after, rollouts=4, clusters=clusters)
            alarms[has_clusters] += found.is_shown
    assert alarms[True] <= 16 < alarms[False]
    # Two clusters that changed by the same are two draws, however many tasks they have.
    same = paired_difference("pass@1", [0.0] * 8, [1.0] * 8, clusters=["a", "b"] * 4)
    assert (same.is_alike, same.p, same.num_clusters) == (True, 0.5, 2)


def test_one_cluster_is_not_told_as_one_example():
    one = paired_difference(
        "pass@1", [0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.5, 1.0], clusters=["a"] * 4
    )
    assert (one.low, one.num_clusters) == (None, 1)
    assert "on 4 examples in 1 cluster, which shows nothing about others" in sentence(one)
    two = paired_difference("pass@1", [0, 1, 0, 0], [1, 0, 1, 1], clusters=["a", "a", "b", "b"])
    assert "too few clusters to find" in sentence(two)


@pytest.mark.parametrize("clusters", [["a", "a", "b", "b"], ["a"] * 4, ["a", "b", "a", "b"]])
def test_examples_are_alike_only_if_each_of_them_is(clusters):
    # Within a cluster, what one example gained another has lost.
    before, after = ([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0])
    found = paired_difference("pass@1", before, after, clusters=clusters)
    assert (found.change, found.is_alike) == (0.0, False)
    assert "changed by the same" not in sentence(found)
    assert paired_difference("pass@1", before, before, clusters=clusters).is_alike


class Passages(SingleTurnEnvironment):
    """Three passages with two questions each."""

    def examples(self, split):
        return ListSource(
            [
                Example(id=f"{split}-{i}", prompt=str(i), cluster=f"passage-{i // 2}")
                for i in range(6)
            ]
        )

    @reward
    def correct(self, completion, example):
        return float(completion == example.prompt)

    @metric
    def number(self, example):
        return float(len(example.cluster))


async def test_the_cluster_of_an_example_reaches_the_result_and_the_comparison(tmp_path):
    settings = EvalSettings(num_examples=6, rollouts=2, ks=(1,), sampling=Sampling(max_tokens=4))
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    opened = InProcessEnvironment(Passages(), name="passages")
    said = ScriptedClient(lambda messages: messages[-1].content[:1].replace("4", "5"))
    result = await run_eval(opened, said, settings, on_rollout=folder.append)
    assert {row.tags["cluster"] for row in folder.rows()} == {f"passage-{i}" for i in range(3)}
    assert (result.pass_at[1].num_tasks, result.pass_at[1].num_clusters) == (6, 3)
    assert "6 scored examples are in 3 clusters" in clusters_note(result)
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result
    better = await run_eval(opened, ScriptedClient(lambda m: m[-1].content), settings)
    assert "paired over 6 examples in 3 clusters" in sentence(compare_results(result, better).main)
