"""Advantages, correction and loss of a million tokens, forward and backward: ours against TRL's.

No model: both sides start from the same log-probs. TRL's side is its own `_compute_loss` on rows
padded to the longest completion, as its trainer lays them out; ours is the packed form.
Run: python benchmarks/bench_loss.py   (needs `pip install trl`, as `make setup` does)
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import facts_of_run, table, write_results
from trl_loss import trl_loss

from telescope_train.algorithms import Terms, load_algorithm, loss_function
from telescope_train.algorithms.terms import shared_metrics
from telescope_train.config.schema import AlgorithmSection

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_loss.py"
NUM_TOKENS, GROUP_SIZE, REPEATS = 1_000_000, 16, 9
CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 2.0
NOTE = f"""\
# Advantages, correction and loss

{NUM_TOKENS:,} trained tokens in groups of {GROUP_SIZE}, forward and backward to the log-probs. Both
sides: GRPO's advantages from rewards, PPO's clip ({CLIP_LOW}, {CLIP_HIGH}) around recomputed
log-probs, truncated importance sampling between sampler and trainer (cap {CAP}), mean over all
tokens, and the clip and correction metrics that each logs. `with step metrics` adds what we report
of every step besides (importance weights, effective sample size, mismatch with the engine), most of
which TRL has no equal of. The losses agree to 1e-5.
TRL's rows are padded to the longest completion, which is where most of its time goes: the last
lengths, all equal, have no padding. The peer's advantages and ratios are written here as its
trainer computes them; its loss is `GRPOTrainer._compute_loss` itself. Making the inputs (packing
here, padding there) is not counted. CPU time of one thread, medians of {REPEATS}, taking turns.

{{facts}}
"""


class Inputs(NamedTuple):
    """One batch: T tokens of N samples, laid end to end."""

    lengths_N: np.ndarray
    rewards_N: np.ndarray
    policy_T: torch.Tensor
    proximal_T: torch.Tensor
    behavior_T: torch.Tensor


def lognormal(rng: np.random.Generator, size: int) -> np.ndarray:
    return (400 * np.exp(0.8 * rng.standard_normal(size))).astype(np.int64).clip(8, 4096)


MIXES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal, median 400, up to 4,096": lognormal,
    "half at most 1,024, half cut there": lambda rng, n: np.where(
        rng.random(n) < 0.5, 1024, rng.integers(64, 1024, n)
    ),
    "all 512": lambda rng, n: np.full(n, 512),
}


def make_inputs(mix: str) -> Inputs:
    rng = np.random.default_rng(0)
    lengths_N = MIXES[mix](rng, 8 * NUM_TOKENS // 512)
    num_groups = int(np.searchsorted(lengths_N.cumsum(), NUM_TOKENS)) // GROUP_SIZE + 1
    lengths_N = lengths_N[: num_groups * GROUP_SIZE]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, int(lengths_N.sum()), generator=generator)
    behavior_T = -noise[0].abs()
    proximal_T = behavior_T + 0.1 * noise[1]
    policy_T = proximal_T + 0.2 * noise[2]
    rewards_N = rng.integers(0, 2, len(lengths_N)).astype(np.float64)
    return Inputs(lengths_N, rewards_N, policy_T, proximal_T, behavior_T)


def make_ours(inputs: Inputs, *, with_step_metrics: bool) -> Callable[[], float]:
    """Return the call that is timed."""
    section = AlgorithmSection(
        algorithm="grpo",
        use_ppo_clip=True,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        ppo_clip_ref_logprobs="batch",
        use_tis=True,
        tis_cap=CAP,
    )
    loss, advantage = loss_function(section), load_algorithm("grpo").advantage
    groups_N = np.arange(len(inputs.lengths_N)) // GROUP_SIZE
    ids_T = torch.from_numpy(np.repeat(np.arange(len(inputs.lengths_N)), inputs.lengths_N))
    mask_T = torch.ones(len(ids_T), dtype=torch.bool)
    weights_T = torch.full((len(ids_T),), 1 / len(ids_T))

    def call() -> float:
        policy_T = inputs.policy_T.clone().requires_grad_()
        advantages_N = advantage(inputs.rewards_N, groups_N, "group").astype(np.float32)
        terms = Terms(
            logprobs_T=policy_T,
            behavior_logprobs_T=inputs.behavior_T,
            advantages_T=torch.from_numpy(np.repeat(advantages_N, inputs.lengths_N)),
            mask_T=mask_T,
            sequence_ids_T=ids_T,
            entropy_T=inputs.behavior_T,
            proximal_logprobs_T=inputs.proximal_T,
        )
        total = (loss(terms).loss_T * weights_T).sum()
        total.backward()
        if with_step_metrics:
            shared_metrics(terms, same_version_T=mask_T)
        return total.item()

    return call


def make_peer(inputs: Inputs) -> Callable[[], float]:
    """Return the call that is timed; rows are padded on the right."""
    mask_BL = torch.from_numpy(np.arange(inputs.lengths_N.max()) < inputs.lengths_N[:, None])

    def padded(values_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask_BL.shape).masked_scatter_(mask_BL, values_T)

    policy_BL, proximal_BL, behavior_BL = map(padded, inputs[2:])
    whole_BL = mask_BL.long()
    rewards_B = torch.from_numpy(inputs.rewards_N).float()

    def call() -> float:
        leaf_BL = policy_BL.clone().requires_grad_()
        grouped = rewards_B.view(-1, GROUP_SIZE)
        mean_B, std_B = (x.repeat_interleave(GROUP_SIZE) for x in (grouped.mean(1), grouped.std(1)))
        ratio_BL = torch.exp(torch.nan_to_num((proximal_BL - behavior_BL) * whole_BL, nan=0.0))
        columns = {
            "policy": leaf_BL,
            "old": proximal_BL,
            "mask": whole_BL,
            "advantages": (rewards_B - mean_B) / (std_B + 1e-4),
            "ratio": torch.clamp(ratio_BL, max=CAP),
        }
        total = trl_loss(columns, loss_type="dapo", low=CLIP_LOW, high=CLIP_HIGH)
        total.backward()
        return total.item()

    return call


def measure(mix: str) -> dict[str, Any]:
    """Return both sides' times on one batch."""
    inputs = make_inputs(mix)
    sides = {
        "ours": make_ours(inputs, with_step_metrics=False),
        "metrics": make_ours(inputs, with_step_metrics=True),
        "peer": make_peer(inputs),
    }
    losses = {side: call() for side, call in sides.items()}
    assert abs(losses["ours"] - losses["peer"]) < 1e-5 * max(1e-2, abs(losses["peer"])), losses
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(REPEATS):
        for side, call in sides.items():
            started = time.process_time()
            call()
            seconds[side].append(time.process_time() - started)
    ours_s, metrics_s, peer_s = (statistics.median(seconds[side]) for side in sides)
    padded = int(inputs.lengths_N.max()) * len(inputs.lengths_N)
    return {
        "mix": mix,
        "num_tokens": int(inputs.lengths_N.sum()),
        "padded_share": 1 - inputs.lengths_N.sum() / padded,
        "ours_ms": 1e3 * ours_s,
        "metrics_ms": 1e3 * metrics_s,
        "peer_ms": 1e3 * peer_s,
        "ratio": peer_s / ours_s,
        "metrics_ratio": peer_s / metrics_s,
        "ours_loss": losses["ours"],
        "peer_loss": losses["peer"],
    }


HEAD = (
    *("lengths", "tokens", "padding of the peer", "ours, ms", "peer, ms", "ratio"),
    *("with step metrics, ms", "ratio"),
)


def as_cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    return [
        *(row["mix"], f"{row['num_tokens']:,}", f"{row['padded_share']:.0%}"),
        *(f"{row['ours_ms']:.0f}", f"{row['peer_ms']:.0f}", f"{row['ratio']:.1f}x"),
        *(f"{row['metrics_ms']:.0f}", f"{row['metrics_ratio']:.1f}x"),
    ]


def main() -> None:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    facts = facts_of_run(COMMAND, "torch", "trl")
    rows = []
    for mix in MIXES:
        rows.append(measure(mix))
        print(" | ".join(as_cells(rows[-1])), flush=True)
    write_results("loss", NOTE + "\n" + table(HEAD, list(map(as_cells, rows))), facts, rows)


if __name__ == "__main__":
    main()
