"""The benchmark of training speed: it runs without a GPU, and its FLOPs are the model's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from training.shapes import QWEN3, TINY, write_random_model  # noqa: E402

pytestmark = pytest.mark.slow


def test_it_runs_without_a_gpu_and_says_what_is_owed(tmp_path):
    subprocess.run(
        [sys.executable, BENCHMARKS / "bench_training.py", "--results", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=2900,
        check=True,
    )
    assert "are owed" in (tmp_path / "training.md").read_text()
    *rows, logprobs = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert {row["gradient_checkpointing"] for row in rows} == {True, False}
    assert all(row["tokens_per_s"] > 0 and row["fill"] > 0.8 for row in rows)
    assert logprobs["seconds"] > 0


def test_flops_are_those_of_the_matrix_products(tmp_path):
    write_random_model(TINY, tmp_path, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.set_attn_implementation("eager")
    length = 48
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, length, dtype=torch.long), use_cache=False).logits
        logits.sum().backward()
    expected = TINY.training_flops([length])
    # Eager attention computes both halves of the causal square.
    other_half = 6.0 * length**2 * TINY.heads * TINY.head_dim * TINY.layers
    assert counter.get_total_flops() == pytest.approx(expected + other_half, rel=0.01)


def test_shapes_are_those_of_their_names():
    sizes = [shape.matrix_parameters / 1e9 for shape in QWEN3]
    assert sizes == pytest.approx([0.596, 1.72, 4.02], rel=0.01)
