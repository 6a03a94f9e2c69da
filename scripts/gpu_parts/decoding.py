"""A run's server beside plain `vllm serve`: tokens per second, and how long it takes to start."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_decoding import DEVICE, Decoded, compare, default_load, median_of, plain_server
from gpu_parts.measures import SETTINGS, SHARED, seconds_to_training
from gpu_parts.part import Found, Part, within
from training.shapes import QWEN3, write_random_model

from telescope_train.models.tiny import make_tiny_model

LEAST_OF_PLAIN = 0.95
"""Times the tokens per second of `vllm serve`."""
MOST_MORE_S = 10.0
"""Seconds until a run trains, beyond those in which `vllm serve` is ready."""


def check() -> Found:
    """Start both servers, one after the other."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = Path(folder) / "model"
        write_random_model(QWEN3[0], model, DEVICE)
        return judged(compare(default_load(model), rounds=1))


def judged(found: Sequence[Decoded]) -> Found:
    """Return whether our server decodes about as fast."""
    ours, plain = median_of(found, "ours"), median_of(found, "plain")
    text = f"{ours:,.0f} tokens/s, vllm serve {plain:,.0f}, {ours / plain:.2f} times"
    return Found(text=text, is_met=ours >= LEAST_OF_PLAIN * plain)


def check_start() -> Found:
    """Start a run and `vllm serve` twice each: what the first compiles, the second finds."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        place = Path(folder)
        model = make_tiny_model(place / "tiny", seed=0)
        (place / "run.toml").write_text(SETTINGS, encoding="utf-8")
        shared = SHARED if DEVICE.type == "cuda" else ()
        more = ["--number_of_steps", "1", "--model", str(model), *shared]
        for name in ("one", "two"):
            run_s = seconds_to_training(name, more, place)
        for name in ("one", "two"):
            begun_s = time.monotonic()
            with plain_server(default_load(model), place / f"{name}.log"):
                plain_s = time.monotonic() - begun_s
    text = f"{run_s:.0f} s until it trains, vllm serve ready after {plain_s:.0f} s"
    return within(text, run_s, plain_s + MOST_MORE_S)


def parts() -> Iterator[Part]:
    """Yield both parts."""
    yield Part(
        name=f"{QWEN3[0].name}: decoding beside `vllm serve`",
        limit=f"at least {LEAST_OF_PLAIN:g} times its tokens a second",
        run=check,
        num_gpus=1,
        seconds=300,
    )
    yield Part(
        name="second start of a run beside `vllm serve`",
        limit=f"at most {MOST_MORE_S:g} s more",
        run=check_start,
        seconds=420,
    )
