"""Whole GRPO steps of 16 groups of 16 answers of 512 tokens on one GPU, beside TRL's.

TRL samples with vLLM in its own process, which is its default on one GPU, and recomputes no
activations, so ours may keep what fits too, and shares the GPU as its plan decides. A model with
random weights hardly ever ends an answer, so that both sides sample and train as many tokens.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench_training import DEVICE
from gpu_parts.measures import rows_of_run
from gpu_parts.part import Found, Part, left_out
from grpo_step.settings import load_records
from grpo_step.side_process import run_side
from training.shapes import QWEN3, write_random_model

STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 16, 16, 512
WARM_UP = 2
LEAST_TIMES = 1.5
"""That our steps are faster than TRL's."""
SETTINGS = f"""
[run]
name = "check"
number_of_steps = {STEPS}

[[environments]]
name = "{Path(__file__).with_name("lengths.py")}:Lengths"

[rollout]
group_size = {GROUP_SIZE}
prompts_batch_size_for_trainer = {GROUPS}
max_tokens = {MAX_TOKENS}
discard_group_zero_advantage = false

[trainer]
seq_len = 8192
gradient_checkpointing = "auto"

[scheduling]
max_async_rollout = 0

[inference]
max_model_len = {MAX_TOKENS + 256}
"""


def step_s(ended_s: Sequence[float]) -> float:
    """Return the median time of a step after those of warm-up, given when each ended."""
    return statistics.median(
        later - earlier
        for earlier, later in zip(ended_s[WARM_UP:], ended_s[WARM_UP + 1 :], strict=False)
    )


def check() -> Found:
    """Time both sides, one after the other."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        write_random_model(QWEN3[0], folder / "model", DEVICE)
        rows = rows_of_run([], 300, settings=SETTINGS, model=folder / "model")
        ours_s = step_s([row["time_s"] for row in rows])
        tokens = GROUPS * GROUP_SIZE * MAX_TOKENS
        text = f"{ours_s:.2f} s a step, {tokens / ours_s:,.0f} tokens/s"
        if find_spec("trl") is None:
            return left_out(f"{text}; TRL is not installed")
        sizes = [str(one) for one in (STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS)]
        (folder / "trl").mkdir()
        run_side(
            "grpo_step.resident",
            [str(folder / "model"), str(folder / "trl"), *sizes],
            label="TRL",
            log_path=folder / "trl" / "log",
            threads="1",
            deadline_s=280,
        )
        trl_s = step_s([one.ended_s for one in load_records(folder / "trl")])
    return judged(ours_s, trl_s, text)


def judged(ours_s: float, trl_s: float, text: str) -> Found:
    """Return whether our steps are faster by enough."""
    times = trl_s / ours_s
    return Found(text=f"{text}; TRL {trl_s:.2f} s, {times:.2f} times", is_met=times >= LEAST_TIMES)


def parts() -> Iterator[Part]:
    """Yield the one part."""
    yield Part(
        name=f"{QWEN3[0].name}: GRPO step beside TRL, one GPU",
        limit=f"at least {LEAST_TIMES:g} times as fast as TRL with vLLM in its process",
        run=check,
        num_gpus=1,
        seconds=600,
    )
