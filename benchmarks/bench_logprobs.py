"""Log-probs in blocks against log_softmax and gather: peak memory and time, on CPU.

Each measurement is a process of its own, so that its resident memory is its own; both sides start
from the same tensors and take turns. Run: python benchmarks/bench_logprobs.py [--quick]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from machine import facts_of_run, table, write_results
from torch import Tensor

from telescope_train.models.logprobs import chunked_logprobs

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_logprobs.py"
CHUNK_SIZE = 1024
NOTE = f"""\
# Log-probs without the logits of all tokens

Ours: `chunked_logprobs` with blocks of {CHUNK_SIZE} tokens (the default of `entropy_chunk_size`).
It returns the entropy as well; the peer of `log-prob` does not, which favours the peer.
Peer: `(hidden @ weight.T).div_(temperature).log_softmax(1).gather(1, targets)` under autograd, and
for `log-prob + entropy` also `-(p * log p).sum(1)`, with the gradient of both.
Peak memory is the highest resident memory during the call less what was resident just before it:
inputs are not counted, outputs and the gradients of both inputs are. Time is CPU time of one
thread. Each cell is the median of processes of its own, the sides taking turns. float32.
Backward computes the logits again, so it does four matrix products to the peer's three; it is
the peer's passes over memory that cost more. Where the hidden size is large, the products weigh
more and the gain in time is smaller, and the gradient of the head, which both sides return, is
most of our memory.

{{facts}}
"""


class Case(NamedTuple):
    """One thing to measure. T tokens, V vocabulary, H hidden size."""

    num_tokens: int
    vocab: int
    hidden: int
    what: str
    """`log-prob` or `log-prob + entropy`."""
    has_backward: bool


SHAPES = ((1024, 32_000, 256), (1024, 151_936, 1024), (4096, 151_936, 256))
CASES = [
    *(Case(*shape, "log-prob", has_backward) for shape in SHAPES for has_backward in (False, True)),
    Case(*SHAPES[-1], "log-prob + entropy", True),
]


def ours(hidden_TH: Tensor, weight_VH: Tensor, case: Case, rest: tuple[Tensor, Tensor]) -> Tensor:
    found = chunked_logprobs(
        hidden_TH,
        weight_VH,
        *rest,
        chunk_size=CHUNK_SIZE,
        entropy_grad=case.what != "log-prob",
    )
    return found.logprobs_T if case.what == "log-prob" else found.logprobs_T + found.entropy_T


def peer(hidden_TH: Tensor, weight_VH: Tensor, case: Case, rest: tuple[Tensor, Tensor]) -> Tensor:
    targets_T, temperatures_T = rest
    all_TV = (hidden_TH @ weight_VH.T).div_(temperatures_T[:, None]).log_softmax(1)
    logprobs_T = all_TV.gather(1, targets_T[:, None])[:, 0]
    return logprobs_T if case.what == "log-prob" else logprobs_T - (all_TV.exp() * all_TV).sum(1)


def status_mib(line: str) -> float:
    """Return a line of /proc/self/status, in MiB."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"no {line} in /proc/self/status: this benchmark needs Linux"
    return int(found[1]) / 1024


def measure_here(side: str, case: Case) -> dict[str, float]:
    """Measure one side in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(case.num_tokens, case.hidden, generator=generator)
    weight_VH = torch.randn(case.vocab, case.hidden, generator=generator).mul_(0.05)
    targets_T = torch.randint(0, case.vocab, (case.num_tokens,), generator=generator)
    temperatures_T = 0.5 + torch.rand(case.num_tokens, generator=generator)
    hidden_TH.requires_grad_(case.has_backward)
    weight_VH.requires_grad_(case.has_backward)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far starts from now
    before_mib, started = status_mib("VmRSS"), time.process_time()
    call = ours if side == "ours" else peer
    total = call(hidden_TH, weight_VH, case, (targets_T, temperatures_T)).sum()
    if case.has_backward:
        total.backward()
    return {
        "cpu_s": time.process_time() - started,
        "peak_mib": status_mib("VmHWM") - before_mib,
        "total": total.item(),
    }


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Run both sides in turns, each in a process of its own; returns medians and ratios."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(repeats):
        for side, runs in found.items():
            done = subprocess.run(
                [sys.executable, __file__, "--one", json.dumps([side, *case])],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=600,
                check=True,
            )
            runs.append(json.loads(done.stdout))
    row: dict[str, object] = case._asdict()
    medians = {
        side: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for side, runs in found.items()
    }
    assert abs(medians["ours"]["total"] / medians["peer"]["total"] - 1) < 1e-4, medians
    for side, values in medians.items():
        row |= {f"{side}_{key}": value for key, value in values.items()}
    row["memory_ratio"] = medians["peer"]["peak_mib"] / medians["ours"]["peak_mib"]
    row["time_ratio"] = medians["peer"]["cpu_s"] / medians["ours"]["cpu_s"]
    return row


HEAD = (
    *("T", "V", "H", "what", "pass"),
    *("ours, MiB", "peer, MiB", "less memory", "ours, s", "peer, s", "faster"),
)


def as_cells(row: dict) -> list[str]:
    """Return one line of the table."""
    return [
        *(f"{row[name]:,}" for name in ("num_tokens", "vocab", "hidden")),
        row["what"],
        "forward + backward" if row["has_backward"] else "forward",
        f"{row['ours_peak_mib']:,.0f}",
        f"{row['peer_peak_mib']:,.0f}",
        f"{row['memory_ratio']:.1f}x",
        f"{row['ours_cpu_s']:.2f}",
        f"{row['peer_cpu_s']:.2f}",
        f"{row['time_ratio']:.2f}x",
    ]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, once; write no results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, *case = json.loads(arguments.one)
        print(json.dumps(measure_here(side, Case(*case))))
        return
    facts = facts_of_run(COMMAND, "torch")
    rows = []
    for case in CASES[:2] if arguments.quick else CASES:
        rows.append(measure(case, repeats=1 if arguments.quick else 3))
        print(" | ".join(as_cells(rows[-1])), flush=True)
    if not arguments.quick:
        page = NOTE + "\n" + table(HEAD, [as_cells(row) for row in rows])
        write_results("logprobs", page, facts, rows)


if __name__ == "__main__":
    main()
