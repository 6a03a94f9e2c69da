"""A GRPO step over groups that share their prompt: computed once, once per completion, and by TRL.

Same model, samples, rank and process; the ways take turns. Weights are random and nothing is
downloaded. TRL is its GRPOTrainer's own loss over the same samples, forward and backward with
gradient checkpointing as ours, and torch's AdamW.
Run: OMP_NUM_THREADS=2 python benchmarks/bench_prefixes.py [--shape tiny]
"""

import argparse
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import RESULTS, facts_of_run, table, write_results
from training.memory import peak_gib, start_of_peak
from training.shapes import TINY, Shape, write_random_model
from transformers import AutoModelForCausalLM

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.config.trainer_section import CheckpointingChoice
from telescope_train.trainer.worker import TrainerWorker

COMMAND = "OMP_NUM_THREADS=2 python benchmarks/bench_prefixes.py"
PROMPT, COMPLETION, GROUP_SIZE, SEQ_LEN = 512, 128, 16, 10_240
MEDIUM = Shape("100M", 768, 2048, 12, 12, 4, 64, 32_000)
GROUPS = {"tiny": 4, "100M": 1}
"""Groups of a step."""
TARGET = 3.5
NOTE = f"""\
# Prompts computed once

One optimizer step of GRPO over groups of {GROUP_SIZE}: prompts of {PROMPT} tokens, completions of
{COMPLETION}. One rank in one process, float32, all layers recomputed, rows of at
most {SEQ_LEN:,} tokens. "apart" is `share_prefixes = false` and recomputes all layers, which is how
every step was computed before. "as needed" is `gradient_checkpointing = "auto"`: a rank of its own,
opened after the other was closed. Times are medians; the ways of a rank take turns, the first turn
is not counted. Memory is the most that the process had held after the first step of a way, beyond
what it held before all of them. The ways come in the order of the table, so a way needs at most
what its line says; the second rank takes what the first gave back, so its memory does not show.

{{result}}

{{facts}}
"""


class Case(NamedTuple):
    """One way to take a step."""

    name: str
    step: Callable[[], Any]


def make_samples(shape: Shape) -> list[TrainingSample]:
    """Return the samples of all groups."""
    rng = np.random.default_rng(0)
    return [
        make_sample(rng, shape, prompt, f"group-{group}", index)
        for group in range(GROUPS[shape.name])
        for prompt in [rng.integers(shape.vocab, size=PROMPT, dtype=np.int32)]
        for index in range(GROUP_SIZE)
    ]


def make_sample(
    rng: np.random.Generator, shape: Shape, prompt: np.ndarray, group: str, index: int
) -> TrainingSample:
    """Return one completion of `prompt`."""
    completion = rng.integers(shape.vocab, size=COMPLETION, dtype=np.int32)
    mask = np.arange(PROMPT + COMPLETION) >= PROMPT
    return TrainingSample(
        token_ids=np.concatenate([prompt, completion]),
        mask=mask,
        behavior_logprobs=np.where(mask, -np.log(shape.vocab), np.nan).astype(np.float32),
        advantage=float(rng.standard_normal()),
        temperature=1.0,
        oldest_version=0,
        newest_version=0,
        group_id=group,
        rollout_index=index,
        environment="bench",
    )


def ours(
    worker: TrainerWorker, samples: list[TrainingSample], shape: Shape, *, share: bool, suffix: str
) -> Case:
    """Return our step, packing included."""

    def step() -> None:
        weights_N = token_weights(samples, "token", max_tokens=COMPLETION)
        (batches,) = pack(
            samples,
            weights_N,
            seq_len=SEQ_LEN,
            num_ranks=1,
            hidden_size=shape.hidden,
            share_prefixes=share,
        )
        worker.train_step(batches, version=0)

    return Case(("prompts once" if share else "apart") + suffix, step)


def trl(model: Path, samples: list[TrainingSample], folder: Path) -> Case:
    """Return TRL's step: its trainer's loss on rows of prompt and completion, then AdamW."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=COMPLETION,
            gradient_checkpointing=True,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP_SIZE),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    groups = [samples[at : at + GROUP_SIZE] for at in range(0, len(samples), GROUP_SIZE)]
    inputs = [trl_inputs(group) for group in groups]

    def step() -> None:
        for one in inputs:
            trainer._compute_loss(trainer.model, one).div(len(inputs)).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Case("TRL", step)


def trl_inputs(group: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Return what TRL's loss takes of one group."""
    ids = torch.tensor(np.stack([sample.token_ids for sample in group]), dtype=torch.long)
    ones = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": ones[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": ones[:, PROMPT:],
        "advantages": torch.tensor([sample.advantage for sample in group]),
        "old_per_token_logps": None,
        "ref_per_token_logps": None,
        "num_items_in_batch": torch.tensor(GROUP_SIZE * COMPLETION),
    }


def measure(shape: Shape, *, steps: int, with_trl: bool) -> dict[str, Any]:
    """Return the time and memory of a step in each way."""
    samples = make_samples(shape)
    with tempfile.TemporaryDirectory(prefix="bench-prefixes-") as name:
        model = Path(name) / "model"
        write_random_model(shape, model, torch.device("cpu"))
        # A process can have one rank at a time.
        with opened_rank(model, "full") as worker:
            cases = [
                ours(worker, samples, shape, share=share, suffix="") for share in (True, False)
            ]
            if with_trl:
                cases.append(trl(model, samples, Path(name) / "trl"))
            found = timed(cases, steps)
            profile = profile_of(cases[0])
            del cases
        with opened_rank(model, "auto") as worker:
            as_needed = timed(
                [
                    ours(worker, samples, shape, share=share, suffix=", as needed")
                    for share in (True, False)
                ],
                steps,
            )
        # The second rank takes what the first one gave back, so its memory does not show.
        as_needed["peak_gib"] = {}
        merged = {part: found[part] | as_needed[part] for part in found}
        return merged | {"shape": shape.name, "profile": profile}


@contextmanager
def opened_rank(model: Path, checkpointing: CheckpointingChoice) -> Iterator[TrainerWorker]:
    """Return a rank that has loaded `model` and passed its self-tests."""
    worker = TrainerWorker(
        BackendSettings(
            model=ModelSection(model=str(model)),
            trainer=TrainerSection(seq_len=SEQ_LEN, gradient_checkpointing=checkpointing),
            algorithm=AlgorithmSection(),
            seed=0,
            number_of_steps=100,
        ),
        num_threads=torch.get_num_threads(),
    )
    try:
        yield worker
    finally:
        worker.close()


def timed(cases: list[Case], steps: int) -> dict[str, Any]:
    """Return the median time of each case in turns, and its peak memory."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    peaks: dict[str, float] = {}
    before_gib = start_of_peak()
    for turn in range(steps + 1):
        for case in cases:
            started_s = time.perf_counter()
            case.step()
            took_s = time.perf_counter() - started_s
            # A rank keeps freed memory, so what a later case needs beyond earlier ones shows once.
            peaks.setdefault(case.name, peak_gib() - before_gib)
            if turn:  # the first is to warm up
                seconds[case.name].append(took_s)
            print(f"{case.name}: {took_s:.2f} s", flush=True)
    return {
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "all_seconds": seconds,
        "peak_gib": peaks,
    }


def profile_of(case: Case) -> str:
    """Return the ten functions in which a step spends most of its time."""
    profile = cProfile.Profile()
    profile.runcall(case.step)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(10)
    return text.getvalue()


def page_of(rows: list[dict[str, Any]]) -> str:
    """Return the table, and whether the target was met."""
    lines = []
    for row in rows:
        apart_s = row["seconds"]["apart"]
        for name, took_s in row["seconds"].items():
            tokens = GROUPS[row["shape"]] * GROUP_SIZE * (PROMPT + COMPLETION)
            cells = [row["shape"], name, f"{took_s:.2f}", f"{tokens / took_s:,.0f}"]
            peak = row["peak_gib"].get(name)
            memory = "" if peak is None else f"{peak:.2f}"
            lines.append([*cells, f"{apart_s / took_s:.2f}", memory])
    head = ("shape", "step", "s", "tokens/s", "times as fast as apart", "peak, GiB")
    said = [
        f"{row['shape']}: {apart_s / row['seconds'][way]:.2f} times with {way}, target {TARGET}."
        for row in rows
        for apart_s in [row["seconds"]["apart"]]
        for way in ("prompts once", "prompts once, as needed")
    ]
    return "\n".join([table(head, lines), "", *said])


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(GROUPS), help="only this one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = facts_of_run(COMMAND, "torch", "transformers", "trl")
    shapes = [shape for shape in (TINY, MEDIUM) if arguments.shape in (None, shape.name)]
    rows = [
        measure(shape, steps=arguments.steps, with_trl=not arguments.without_trl)
        for shape in shapes
    ]
    result = page_of(rows)
    print(result)
    for row in rows:
        print(row["profile"])
    facts["load_average_after"] = facts_of_run(COMMAND)["load_average"]
    write_results("prefixes", NOTE.replace("{result}", result), facts, rows, arguments.results)


if __name__ == "__main__":
    main()
