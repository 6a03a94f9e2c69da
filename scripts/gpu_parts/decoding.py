"""Tokens per second of a server as a run starts it, beside plain `vllm serve`."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_decoding import DEVICE, Decoded, compare, default_load, median_of
from gpu_parts.part import Found, Part
from training.shapes import QWEN3, write_random_model

LEAST_OF_PLAIN = 0.95
"""Times the tokens per second of `vllm serve`."""


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


def parts() -> Iterator[Part]:
    """Yield the one part."""
    yield Part(
        name=f"{QWEN3[0].name}: decoding beside `vllm serve`",
        limit=f"at least {LEAST_OF_PLAIN:g} times its tokens a second",
        run=check,
        num_gpus=1,
        seconds=300,
    )
