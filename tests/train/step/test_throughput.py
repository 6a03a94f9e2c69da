"""FLOPs, their balance over ranks, and the share of a GPU's peak."""

from dataclasses import replace

import numpy as np
import pytest

from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack
from telescope_train.models.facts import facts_of
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.credit import Credit
from telescope_train.step.metrics import LAPS, StepResult, step_row
from telescope_train.step.throughput import (
    Machine,
    flops_imbalance,
    peak_flops,
    throughput_metrics,
    training_flops,
)

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}
FACTS = facts_of(CONFIG)


def packed(make_sample, lengths, *, num_ranks=1, seq_len=64):
    samples = [make_sample(2, n - 2, rollout=i) for i, n in enumerate(lengths)]
    return pack(samples, np.ones(len(samples)), seq_len=seq_len, num_ranks=num_ranks)


def test_flops_equal_a_count_by_hand(make_sample):
    layer = 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16 + 2 * 8 + 2 * 4
    body, head, width = 3 * layer + 8, 50 * 8, 3 * 2 * 4
    ((batch,),) = packed(make_sample, [10, 20])
    expected = 6 * body * 30 + 6 * head * (8 + 18) + 6 * width * (10**2 + 20**2)
    assert training_flops(FACTS, [batch]) == expected
    assert training_flops(replace(FACTS, num_body_parameters=None), [batch]) is None


def test_imbalance_is_1_when_ranks_share_evenly_and_counts_waiting(make_sample):
    even = packed(make_sample, [32, 32], num_ranks=2, seq_len=32)
    plan = StepPlan(minibatches=[even], order=[0])
    assert flops_imbalance(plan, hidden_size=10**9) == pytest.approx(1.0)
    uneven = packed(make_sample, [30, 10], num_ranks=2, seq_len=32)
    plan = StepPlan(minibatches=[uneven], order=[0])
    assert flops_imbalance(plan, hidden_size=10**9) == pytest.approx(30 / 20, rel=1e-6)


def test_mfu_counts_epochs_and_ranks_and_is_absent_on_a_cpu(make_sample):
    shards = packed(make_sample, [32, 32], num_ranks=2, seq_len=32)
    plan = StepPlan(minibatches=[shards], order=[0, 0])
    machine = Machine(facts=FACTS, seq_len=32, hidden_size=8, gpu_name="NVIDIA H200")
    row = throughput_metrics(plan, 2.0, machine)
    flops = training_flops(FACTS, plan.packed)
    assert row["mfu"] == pytest.approx(2 * flops / (2.0 * 989e12 * 2))
    assert row["tokens/train_per_s"] == 64
    assert row["pack/fill"] == 1.0
    assert "mfu" not in throughput_metrics(plan, 2.0, replace(machine, gpu_name=None))
    nothing = throughput_metrics(StepPlan(minibatches=[], order=[]), 1.0, machine)
    assert nothing == {"tokens/trained": 0.0}


def test_peaks_are_of_the_card_that_is_named():
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 NVL") == 835e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GH200 480GB") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA L40") == 181e12
    # Cards that are not in the table, and begin like one that is.
    for name in ("NVIDIA RTX A1000", "NVIDIA A10G", "Some card"):
        assert peak_flops(name) is None


@pytest.mark.parametrize(("duration_s", "is_known"), [(None, False), (2.0, True)])
def test_a_batch_whose_time_is_not_known_has_no_speed(duration_s, is_known):
    result = StepResult(
        batch=SampledBatch(groups=(), duration_s=duration_s),
        credit=Credit(
            samples=(), advantages={}, of_agents={}, discarded={}, filtered={}, metrics={}
        ),
        plan=StepPlan(minibatches=[], order=[]),
        times=dict.fromkeys(LAPS, 1.0),
    )
    machine = Machine(facts=FACTS, seq_len=64, hidden_size=8, gpu_name=None)
    row = step_row(result, machine, version=3, max_async_rollout=1)
    assert ("time/batch_s" in row, "tokens/rollout_per_s" in row) == (is_known, is_known)
