"""Whole runs with servers, each against its limit.

G1 to G10 are what was set out to be measured on a GPU; what cannot be measured is named.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.part import Found, Part, left_out, within

from telescope_core.records import RunFolder
from telescope_train.diagnostics.engine_check import LIMITS
from telescope_train.models.device import cpu_has_amx
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
MISMATCH = {"cpu": 1e-3, "cuda": 0.05, "fp8": LIMITS["fp8"]}
"""Most that log-probs of vLLM and trainer may differ in the mean of a step, in nats."""
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


def seconds_to_training(name: str, more: Sequence[str], place: Path, seconds: int = 200) -> float:
    """Return the seconds from the start of the run `name` in `place` until it says it trains."""
    begun_s = time.time()
    telescope(["train", "run.toml", "--name", name, *more], place, seconds)
    log = (place / "runs" / name / "logs" / "driver.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in log.splitlines()]
    return next(row["time_s"] for row in rows if row["message"] == "training") - begun_s


def rows_of_run(
    more: Sequence[str], seconds: int, *, settings: str = SETTINGS, model: Path | None = None
) -> list[dict[str, Any]]:
    """Train `model`, or else a tiny one; returns the rows of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = model or make_tiny_model(place / "tiny", seed=0)
        (place / "run.toml").write_text(settings, encoding="utf-8")
        telescope(["train", "run.toml", "--model", str(model), *more], place, seconds)
        return RunFolder(place / "runs" / "check").metrics()


def train(more: Sequence[str], device: str, seconds: int = 400) -> Found:
    """Train two steps of a tiny model; compares log-probs of vLLM with those of the trainer."""
    return judged_mismatch(rows_of_run(more, seconds), device)


def rounded(device: str) -> Found:
    """The same, with servers that round weights to 8 bits."""
    if device == "cpu" and not cpu_has_amx():
        return left_out("needs a GPU, or a CPU with AMX")
    more = SHARED if device == "cuda" else ("--mixed_precision_dtype", "bfloat16")
    rows = rows_of_run([*more, "--inference_quantization", "fp8"], 200)
    return judged_mismatch(rows, "fp8")


def judged_mismatch(rows: Sequence[dict[str, Any]], device: str) -> Found:
    """Return whether engine and trainer agree in each step that compared them, and one did (G5)."""
    found = [row["mismatch/mean"] for row in rows if row.get("mismatch/mean") is not None]
    if not found:
        return Found(text="no step of the run compared log-probs", is_met=False)
    return within(f"{max(found):.1e} nats in {len(rows)} steps", max(found), MISMATCH[device])


def shares(more: Sequence[str], device: str, seconds: int = 400) -> Found:
    """Train eight steps; compares log-probs, and says where the time went."""
    rows = rows_of_run([*more, "--number_of_steps", "8"], seconds)
    agreed, spent = judged_mismatch(rows, device), judged_shares(rows, device)
    return Found(text=f"{agreed.text}; {spent.text}", is_met=bool(agreed.is_met and spent.is_met))


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


def parts(num_gpus: int) -> Iterator[Part]:
    """Yield runs, then what nothing measures."""
    device = "cuda" if num_gpus else "cpu"
    ways = [("with servers apart", 2, [])] if num_gpus else [("on the CPU", 0, [])]
    for where, needed, more in [("on one GPU", 1, SHARED), *ways]:

        def shared(more: Sequence[str] = more) -> Found:
            return shares(more, device)

        yield Part(
            name=f"run {where}: mismatch (G5), shares of its wall time (G10)",
            limit=f"{MISMATCH[device]:g} nats in the mean, at least {LEAST_EXPLAINED:.0%} in "
            f"steps, at most {MOST_SYNC[device]:.0%} of them for weights",
            run=shared,
            num_gpus=needed,
            seconds=420,
        )
    for level in ("1", "2"):
        more = [*SHARED, "--colocate_sleep_level", level]

        def run(more: Sequence[str] = more) -> Found:
            return train(more, "cuda", 200)

        yield Part(
            name=f"run on one GPU, sleep at level {level}, wake, ipc: mismatch (G5)",
            limit=f"{MISMATCH['cuda']:g} nats in the mean",
            run=run,
            num_gpus=1,
            seconds=220,
        )
    yield Part(
        name="run with rollouts in 8 bits: mismatch",
        limit=f"{MISMATCH['fp8']:g} nats in the mean",
        run=lambda: rounded(device),
        seconds=220,
    )
    for name, why in NOT_MEASURED.items():
        yield Part(name=name, limit="", run=lambda why=why: left_out(why))
