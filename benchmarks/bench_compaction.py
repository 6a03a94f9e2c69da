"""Training the branches of agents whose context is compacted: as trees, and one by one.

Rollouts of long agents are made of random tokens, recorded and packed as those of a run are. Tokens
and FLOPs are counted; the gradient of a tiny model is timed. Nothing is downloaded.
Run: OMP_NUM_THREADS=2 python benchmarks/bench_compaction.py [--without-times]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import RESULTS, facts_of_run, table, write_results
from training.shapes import QWEN3, TINY, Shape, write_random_model

from telescope_core.base.chains import ChainRecorder
from telescope_core.types import Completion, Message, Rollout, Turn
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import end_to_end, pack
from telescope_train.batches.prefixes import prefix_order
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.trainer.worker import TrainerWorker

COMMAND = "OMP_NUM_THREADS=2 python benchmarks/bench_compaction.py"
SYSTEM, TASK, SUMMARY, ASK = 900, 200, 300, 60
"""Tokens of the system message with its tools, of a task, of a summary, and of asking for one."""
LEFT_OUT = 15
"""Tokens that stand in place of a result."""
SHAPE = QWEN3[0]
"""Whose FLOPs are counted."""
LIMIT = 1.15
NOTE = f"""\
# Agents whose context is compacted, as trees

Each rollout has 30 turns (some 120 tokens sampled, results of some 500), two sub-agents of six
turns, and a context that is compacted whenever it has more than 6,500 tokens. Two rollouts of one
task are a group. "distinct" are the tokens of all branches with each common beginning counted once.
"tree" is what `share_prefixes` computes; "a pass for each branch" is what is computed without it,
K + 1 passes for K compactions. FLOPs are those of {SHAPE.name}, forward and backward, attention
included; the target is a tree of at most {LIMIT} times the distinct ones. Rows of `seq_len` tokens
hold a part of a tree when it is larger. "thinking left out" is no compaction: a template that takes
the thinking out of earlier turns makes each turn a branch.

{{result}}

{{facts}}
"""


class Sizes(NamedTuple):
    """How an agent works."""

    strategy: str
    max_context: int
    keep_turns: int = 3


CASES = (
    Sizes("none", 10**9),
    Sizes("summarize", 6_500),
    Sizes("drop_tool_results", 6_500),
    Sizes("sliding_window", 6_500),
    Sizes("thinking left out", 10**9),
)


class Agent:
    """Plays one rollout in random tokens."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._sizes = sizes
        self._rng = np.random.default_rng(seed)
        self._recorder = ChainRecorder()
        self._turns: list[Turn] = []
        self.num_compactions = 0

    def tokens(self, number: float) -> list[int]:
        """Return about as many random tokens."""
        size = max(1, int(number * self._rng.uniform(0.6, 1.4)))
        return self._rng.integers(3, TINY.vocab, size=size).tolist()

    def ask(self, prompt: Sequence[int], number: float) -> list[int]:
        """Sample about `number` tokens behind `prompt`."""
        said = self.tokens(number)
        place = self._recorder.record(prompt, said, [-1.0] * len(said), temperature=1.0)
        completion = Completion(
            message=Message(role="assistant", content=""), finish_reason="stop", tokens=place
        )
        self._turns.append(Turn(completion=completion, started_s=0.0, ended_s=0.0, temperature=1.0))
        return said

    def work(self, opening: list[int], num_turns: int) -> None:
        """Take turns from `opening` on; the context is compacted by the strategy."""
        sizes, start = self._sizes, list(opening)
        history: list[tuple[list[int], list[int]]] = []
        for turn in range(num_turns):
            said = self.ask(start + _flat(history), 120)
            if num_turns > 10 and turn in (num_turns // 3, 2 * num_turns // 3):
                self.work(SUB_AGENT + self.tokens(80), 6)
            if sizes.strategy == "thinking left out":
                said = said[len(said) // 2 :]
            history.append((said, self.tokens(500)))
            if len(start) + len(_flat(history)) <= sizes.max_context:
                continue
            self.num_compactions += 1
            if sizes.strategy == "summarize":
                summary = self.ask(start + _flat(history) + self.tokens(ASK), SUMMARY)
                start, history = opening + summary, []
            elif sizes.strategy == "sliding_window":
                history = history[-sizes.keep_turns :]
            else:
                kept = len(history) - sizes.keep_turns
                history = [
                    (said, result[:LEFT_OUT] if at < kept else result)
                    for at, (said, result) in enumerate(history)
                ]

    def rollout(self, index: int) -> Rollout:
        """Return what was played."""
        return Rollout(
            environment="agent",
            example_id="e",
            group_id="g",
            index=index,
            turns=tuple(self._turns),
            reward=float(index),
        )


def _flat(history: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    return [token for said, result in history for token in (*said, *result)]


_OPENING = np.random.default_rng(0)
MAIN = _OPENING.integers(3, TINY.vocab, size=SYSTEM + TASK).tolist()
SUB_AGENT = _OPENING.integers(3, TINY.vocab, size=SYSTEM // 2).tolist()


def group_of(sizes: Sizes) -> tuple[list[TrainingSample], float]:
    """Return the branches of two rollouts, and the compactions of one."""
    samples: list[TrainingSample] = []
    compactions: list[int] = []
    for index in range(2):
        agent = Agent(sizes, index + 1)
        agent.work(MAIN, 30)
        samples += samples_from_rollout(agent.rollout(index), 1.0 - 2.0 * index, 1.0)
        compactions.append(agent.num_compactions)
    return samples, statistics.fmean(compactions)


def flops(shape: Shape, lengths: Sequence[int], shared: Sequence[int]) -> float:
    """Return the FLOPs of samples of which the first `shared` tokens are computed with another."""
    # Own tokens attend to what is shared and, causally, to themselves: L^2 less the square of it.
    pairs = sum(length**2 - begin**2 for length, begin in zip(lengths, shared, strict=True))
    attention = 6.0 * pairs * shape.heads * shape.head_dim * shape.layers
    return 6.0 * shape.matrix_parameters * (sum(lengths) - sum(shared)) + attention


def flops_of(shape: Shape, rows: Sequence[PackedBatch]) -> float:
    """Return the FLOPs of packed rows."""
    return sum(
        flops(
            shape,
            row.lengths_S.tolist(),
            [0] * len(row.lengths_S) if row.shared_S is None else row.shared_S.tolist(),
        )
        for row in rows
    )


def packed(samples: Sequence[TrainingSample], seq_len: int, *, share: bool) -> list[PackedBatch]:
    """Return the rows of one rank."""
    weights_N = token_weights(samples, "token", max_tokens=1)
    [rows] = pack(
        samples,
        weights_N,
        seq_len=seq_len,
        num_ranks=1,
        hidden_size=SHAPE.hidden,
        share_prefixes=share,
    )
    return rows


def count(sizes: Sizes, samples: Sequence[TrainingSample], compactions: float) -> dict[str, Any]:
    """Return tokens and FLOPs of the group in each way."""
    order_N, shared_N = prefix_order(samples, min_tokens=1)
    lengths = [len(samples[index]) for index in order_N.tolist()]
    least = flops(SHAPE, lengths, shared_N.tolist())
    found: dict[str, Any] = {
        "strategy": sizes.strategy,
        "compactions": compactions,
        "branches": len(samples),
        "trained": int(sum(int(one.mask.sum()) for one in samples)),
        "distinct": int(sum(lengths) - shared_N.sum()),
        "apart": {
            "tokens": sum(lengths),
            "flops": flops(SHAPE, lengths, [0] * len(lengths)) / least,
        },
    }
    for name, seq_len in (("tree", sum(lengths)), ("rows of 16,384", 16_384)):
        rows = packed(samples, seq_len, share=True) if max(lengths) <= seq_len else None
        if rows is not None:
            computed = sum(row.num_computed_tokens for row in rows)
            found[name] = {"tokens": computed, "flops": flops_of(SHAPE, rows) / least}
    return found


def time_of(samples: Sequence[TrainingSample], steps: int) -> dict[str, float]:
    """Return the median processor time of a gradient in each way, and how far both are apart."""
    whole = sum(map(len, samples))
    weights_N = token_weights(samples, "token", max_tokens=1)
    ways = {
        "tree": packed(samples, whole, share=True),
        "apart": [end_to_end([one], weights_N[[at]]) for at, one in enumerate(samples)],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="bench-compaction-") as name:
        model = Path(name) / "model"
        write_random_model(TINY, model, torch.device("cpu"))
        worker = TrainerWorker(
            BackendSettings(
                model=ModelSection(model=str(model)),
                trainer=TrainerSection(seq_len=whole, gradient_checkpointing="full"),
                algorithm=AlgorithmSection(),
                seed=0,
                number_of_steps=1,
            ),
            num_threads=torch.get_num_threads(),
        )
        try:
            for turn in range(steps + 1):
                for way, batches in ways.items():
                    for parameter in worker.backend._policy.parameters():
                        parameter.grad = None
                    started_s = time.process_time()
                    worker.backend.accumulate_gradient(batches, version=0)
                    took_s = time.process_time() - started_s
                    gradients[way] = torch.cat(
                        [one.flatten() for _, one in worker.backend.export_gradient()]
                    ).double()
                    if turn:  # the first is to warm up
                        seconds[way].append(took_s)
        finally:
            worker.close()
    distance = gradients["tree"] - gradients["apart"]
    return {
        **{way: statistics.median(found) for way, found in seconds.items()},
        "difference": float(distance.norm() / gradients["apart"].norm()),
    }


def page_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables, and whether the target was met."""
    lines = []
    for row in rows:
        tree, apart = row["tree"], row["apart"]
        cut = row.get("rows of 16,384")
        lines.append(
            [
                row["strategy"],
                f"{row['compactions']:g}",
                f"{row['branches']}",
                f"{row['trained']:,}",
                f"{row['distinct']:,}",
                f"{tree['tokens'] / row['distinct']:.3f}",
                f"{tree['flops']:.3f}",
                "" if cut is None else f"{cut['flops']:.3f}",
                f"{apart['tokens'] / row['distinct']:.2f}",
                f"{apart['flops']:.2f}",
            ]
        )
    head = (
        *("context", "compactions", "branches of the group", "trained tokens", "distinct tokens"),
        *("tree: tokens", "tree: FLOPs", "tree in rows of 16,384: FLOPs"),
        *("a pass for each branch: tokens", "FLOPs"),
    )
    parts = [table(head, lines), "", "Tokens and FLOPs as multiples of the distinct ones."]
    worst = max(row["tree"]["flops"] for row in rows)
    parts.append(
        f"Largest tree: {worst:.3f}, target {LIMIT}: {'met' if worst <= LIMIT else 'NOT met'}."
    )
    timed = [row for row in rows if "seconds" in row]
    if timed:
        cells = [
            [
                row["strategy"],
                f"{row['seconds']['tree']:.2f}",
                f"{row['seconds']['apart']:.2f}",
                f"{row['seconds']['apart'] / row['seconds']['tree']:.2f}",
                f"{row['seconds']['difference']:.1e}",
            ]
            for row in timed
        ]
        head = ("context", "tree, s", "a pass for each branch, s", "times as fast", "difference")
        parts += [
            "",
            "The gradient of a tiny model, float32, all layers recomputed, in processor time:",
            "",
        ]
        parts.append(table(head, cells))
    return "\n".join(parts)


def main() -> None:
    """Count, measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--without-times", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    command = f"{COMMAND} --without-times" if arguments.without_times else COMMAND
    facts = facts_of_run(command, "torch", "transformers")
    rows = []
    for sizes in CASES:
        samples, compactions = group_of(sizes)
        row = count(sizes, samples, compactions)
        if not arguments.without_times:
            row["seconds"] = time_of(samples, arguments.steps)
        rows.append(row)
        print(row, flush=True)
    result = page_of(rows)
    print(result)
    facts["load_average_after"] = facts_of_run(COMMAND)["load_average"]
    write_results("compaction", NOTE.replace("{result}", result), facts, rows, arguments.results)


if __name__ == "__main__":
    main()
