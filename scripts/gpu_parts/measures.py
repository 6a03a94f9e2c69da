"""A whole run with servers, and the speed and memory of training, each against its limit.

G1 to G10 are what was set out to be measured on a GPU; those that nothing measures yet are named.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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
NOT_MEASURED = {
    "G2, padded against packed": "no padded path exists to compare with",
    "G6, GB/s of sleep and wake": "vLLM does not tell it; whether they work is a part above",
    "G7, seconds of optimizer offload": "not written yet",
    "G8, bytes that differ between steps": "there is no transfer of differences",
    "G9, decoding of an engine of our own": "there is none; vLLM decodes",
    "G10, shares of wall time of a run": "not written yet; the timeline of any run shows them",
}


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


def train(more: Sequence[str], device: str, seconds: int = 400) -> Found:
    """Train two steps of a tiny model; compares log-probs of vLLM with those of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_tiny_model(place / "tiny", seed=0)
        settings = place / "run.toml"
        settings.write_text(SETTINGS, encoding="utf-8")
        telescope(["train", str(settings), "--model", str(place / "tiny"), *more], place, seconds)
        rows = list(RunFolder(place / "runs" / "check").metrics())
    found = [row["mismatch/mean"] for row in rows if row.get("mismatch/mean") is not None]
    if not found:
        return Found(text="no step of the run compared log-probs", is_met=False)
    return within(f"{max(found):.1e} nats in {len(rows)} steps", max(found), MISMATCH[device])


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
    for level in ("1", "2"):
        shared = ["--colocate", "--max_async_rollout", "0", "--gpu_memory_utilization", "0.4"]
        more = [*shared, "--colocate_sleep_level", level]

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
