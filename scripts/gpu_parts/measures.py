"""Whole runs with servers, and the speed and memory of training, each against its limit.

G1 to G10 are what was set out to be measured on a GPU; what cannot be measured is named.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.part import Found, Part, left_out, within

from telescope_core.records import RunFolder
from telescope_train.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = f"{Path(__file__).with_name('lengths.py')}:Lengths"
SETTINGS = f"""
[run]
name = "check"
number_of_steps = 2

[[environments]]
name = "{ENVIRONMENT}"

[rollout]
group_size = 8
prompts_batch_size_for_trainer = 8
max_tokens = 12

[trainer]
seq_len = 1024

[inference]
max_model_len = 128
"""
MISMATCH = {"cpu": 1e-3, "cuda": 0.05}
"""Most that log-probs of vLLM and trainer may differ in the mean of a step, in nats."""
LEAST_MFU = 0.25
"""Of Qwen3 0.6B, the best row (G1)."""
MOST_LOGPROBS_GIB = 1.5
"""Of the log-probs of 32,768 tokens, forward and backward (G3)."""
SHARED = ("--colocate", "--max_async_rollout", "0", "--gpu_memory_utilization", "0.4")
"""Settings of a run on one GPU."""
NOT_MEASURED = {
    "G9, decoding of an engine of our own": "there is none; vLLM decodes",
}


LEAST_EXPLAINED = 0.8
"""Share of the wall time of a run that lies within its steps (G10)."""
MOST_SYNC = {"cpu": 0.5, "cuda": 0.3}
"""Share of the steps that goes into new weights (G10); those of a tiny model cost what calls do."""
SHARES = ("generate", "train", "sync", "wait")


def telescope(arguments: Sequence[str], place: Path, seconds: int) -> None:
    """Run a command; RuntimeError with what it said if it fails."""
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}".strip()
        raise RuntimeError(f"telescope {arguments[0]} ended with {done.returncode}: {said[-600:]}")


def rows_of_run(more: Sequence[str], seconds: int) -> list[dict[str, Any]]:
    """Train a tiny model; returns the rows of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_tiny_model(place / "tiny", seed=0)
        settings = place / "run.toml"
        settings.write_text(SETTINGS, encoding="utf-8")
        telescope(["train", str(settings), "--model", str(place / "tiny"), *more], place, seconds)
        return RunFolder(place / "runs" / "check").metrics()


def train(more: Sequence[str], device: str, seconds: int = 400) -> Found:
    """Train two steps of a tiny model; compares log-probs of vLLM with those of the trainer."""
    rows = rows_of_run(more, seconds)
    found = [row["mismatch/mean"] for row in rows if row.get("mismatch/mean") is not None]
    if not found:
        return Found(text="no step of the run compared log-probs", is_met=False)
    return within(f"{max(found):.1e} nats in {len(rows)} steps", max(found), MISMATCH[device])


def shares(more: Sequence[str], device: str, seconds: int = 400) -> Found:
    """Train eight steps; says where their time went."""
    rows = rows_of_run([*more, "--number_of_steps", "8"], seconds)
    return judged_shares(rows, device)


def judged_shares(rows: Sequence[dict[str, Any]], device: str) -> Found:
    """Return whether the rows of a run explain its time, and weights take little of it (G10)."""
    # Between the first and the last row lies what all rows but the first tell of.
    wall_s = rows[-1]["time_s"] - rows[0]["time_s"]
    parts_s = {name: sum(row[f"time/{name}_s"] for row in rows[1:]) for name in SHARES}
    in_steps_s = sum(parts_s.values())
    sync = parts_s["sync"] / in_steps_s
    told = ", ".join(f"{name} {one / in_steps_s:.0%}" for name, one in parts_s.items())
    return Found(
        text=f"{told}; steps are {in_steps_s / wall_s:.0%} of {wall_s:.1f} s",
        is_met=in_steps_s / wall_s >= LEAST_EXPLAINED and sync <= MOST_SYNC[device],
    )


def training(seconds: int = 540) -> Found:
    """Run bench_training.py for Qwen3 0.6B; the best MFU, and memory of the log-probs alone."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "benchmarks" / "bench_training.py")
        command = [sys.executable, script, "--shape", "Qwen3 0.6B", "--results", folder]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds)
        (file,) = Path(folder).rglob("*.json")
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return judged(rows)


def judged(rows: Sequence[dict[str, float]]) -> Found:
    """Return whether the rows of bench_training.py keep G1 and G3."""
    speeds = [row["mfu"] for row in rows if row.get("mfu") is not None]
    peaks = [row["peak_gib"] for row in rows if "num_tokens" in row]
    if not speeds or not peaks:
        return Found(text="bench_training.py wrote no MFU or no peak memory", is_met=False)
    return Found(
        text=f"MFU {max(speeds):.1%}, log-probs {max(peaks):.2f} GiB",
        is_met=max(speeds) >= LEAST_MFU and max(peaks) <= MOST_LOGPROBS_GIB,
    )


def parts(num_gpus: int) -> Iterator[Part]:
    """Yield runs, then speed and memory, then what nothing measures."""
    device = "cuda" if num_gpus else "cpu"
    limit = f"{MISMATCH[device]:g} nats in the mean (G5)"
    apart = "run with servers apart, mismatch"
    yield Part(
        name=apart,
        limit=limit,
        run=lambda: train([], device),
        num_gpus=2 if num_gpus else 0,
        seconds=420,
    )
    yield Part(
        name="run, shares of its wall time (G10)",
        limit=f"at least {LEAST_EXPLAINED:.0%} in steps, at most {MOST_SYNC[device]:.0%} of them "
        "for weights",
        run=lambda: shares(SHARED if num_gpus == 1 else [], device),
        num_gpus=1 if num_gpus else 0,
        seconds=420,
    )
    for level in ("1", "2"):
        more = [*SHARED, "--colocate_sleep_level", level]

        def run(more: Sequence[str] = more) -> Found:
            return train(more, "cuda", 200)

        yield Part(
            name=f"one GPU, sleep at level {level}, wake, ipc, mismatch",
            limit=limit if num_gpus else f"{MISMATCH['cuda']:g} nats in the mean (G5)",
            run=run,
            num_gpus=1,
            seconds=220,
        )
    yield Part(
        name="Qwen3 0.6B: MFU (G1), memory of log-probs (G3)",
        limit=f"MFU at least {LEAST_MFU:.0%}, at most {MOST_LOGPROBS_GIB:g} GiB",
        run=training,
        num_gpus=1,
        seconds=560,
    )
    for name, why in NOT_MEASURED.items():
        yield Part(name=name, limit="", run=lambda why=why: left_out(why))
