"""Efficiency of a step: FLOPs, their balance over ranks, MFU. Pure.

Only model FLOPs count: those that a forward and backward pass needs in theory, once per token and
epoch. Recomputed activations and forward passes for old log-probs are work, but not progress.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.batch import PackedBatch, StepPlan
from telescope_train.batches.packing import packing_fill
from telescope_train.batches.prefixes import row_costs
from telescope_train.models.facts import ModelFacts

PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
}
"""Words of a GPU's name -> dense bfloat16 FLOP/s on its data sheet; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Model and hardware, relative to which the speed of a run is measured."""

    facts: ModelFacts
    seq_len: int
    """Most tokens in one packed batch."""
    hidden_size: int
    """Width of the hidden states, which determines the cost of attention."""
    gpu_name: str | None
    """GPU of each trainer rank; None on CPU."""
    ranks_per_shard: int = 1
    """Ranks that share each row (context parallelism)."""


def _shared(batch: PackedBatch) -> NDArray[np.float64]:
    """Return [samples] the tokens that each shares with the one before it."""
    if batch.shared_S is None:
        return np.zeros(len(batch.lengths_S))
    return batch.shared_S.astype(np.float64)


def training_flops(facts: ModelFacts, batches: Sequence[PackedBatch]) -> float | None:
    """Return the FLOPs of one forward and backward pass; None if the model's size is not known.

    It is 6 per parameter and token, with the output head for trained tokens only, and 6 * width *
    length^2 for causal attention, with the width summed over layers. Shared tokens count once.
    """
    body, width, head = facts.num_body_parameters, facts.attention_width, facts.num_head_parameters
    if body is None or width is None or head is None:
        return None
    num_tokens = sum(batch.num_computed_tokens for batch in batches)
    num_trained = sum(batch.num_trained_tokens for batch in batches)
    # A sample's own tokens attend to those that it shares as well.
    squares = sum(
        float((batch.lengths_S.astype(np.float64) ** 2 - _shared(batch) ** 2).sum())
        for batch in batches
    )
    return 6.0 * (body * float(num_tokens) + width * squares + head * num_trained)


def peak_flops(gpu_name: str | None) -> float | None:
    """Return the GPU's peak FLOP/s; None for a CPU or a GPU that is not in the table."""
    if gpu_name is None:
        return None
    words = set(re.split(r"[ -]", gpu_name))
    return next((peak for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)


def flops_imbalance(plan: StepPlan, hidden_size: int) -> float:
    """Return the cost of a step relative to one that all ranks share evenly; at least 1.

    In each round every rank runs one batch, and all wait for the slowest.
    """
    slowest, even = 0.0, 0.0
    for shards in plan.minibatches:
        costs_RB = np.array([[_cost(batch, hidden_size) for batch in shard] for shard in shards])
        slowest += float(costs_RB.max(axis=0).sum())
        even += float(costs_RB.mean(axis=0).sum())
    return slowest / even if even else 1.0


def throughput_metrics(plan: StepPlan, train_s: float, machine: Machine) -> dict[str, float]:
    """Return packing, balance and speed of the trainer; `mfu` only if the GPU's peak is known.

    A step without anything to train on has only `tokens/trained`. `train_s` is the time of all
    optimizer steps in seconds.
    """
    if not plan.order:
        return {"tokens/trained": 0.0}
    packed = plan.packed
    num_epochs = len(plan.order) / len(plan.minibatches)
    num_tokens = sum(batch.num_tokens for batch in packed)
    full = [batch for batch in packed if batch.num_tokens]
    row = {
        "pack/fill": packing_fill(full, machine.seq_len),
        "pack/batches": float(len(packed)),
        "pack/flops_imbalance": flops_imbalance(plan, machine.hidden_size),
        "pack/shared_tokens": float(plan.num_shared_tokens),
        "pack/shared_fraction": plan.num_shared_tokens / num_tokens,
        "tokens/trained": float(sum(batch.num_trained_tokens for batch in packed)),
    }
    if train_s > 0:
        row["tokens/train_per_s"] = num_tokens * num_epochs / train_s
        flops, peak = training_flops(machine.facts, packed), peak_flops(machine.gpu_name)
        if flops is not None and peak is not None:
            num_ranks = len(plan.minibatches[0]) * machine.ranks_per_shard
            row["mfu"] = flops * num_epochs / (train_s * peak * num_ranks)
    return row


def _cost(batch: PackedBatch, hidden_size: int) -> float:
    return float(row_costs(batch.lengths_S, _shared(batch), hidden_size).sum())
