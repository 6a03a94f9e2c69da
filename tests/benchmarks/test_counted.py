"""What a step launches and moves on a GPU has limits: no clock is in these counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with vLLM and with torch for CUDA")
BENCHMARK = Path(__file__).parents[2] / "benchmarks/bench_counted.py"
LIMITS = {
    "layer, forward": (25, 75),
    "layer, backward": (40, 170),
    "head, forward": (40, 800),
    "head, backward": (50, 1_600),
    "weights rounded, once a step": (40, 3_600),
    "optimizer, once a step": (40, 16_700),
}
"""Launches and MB of Qwen3 0.6B and 1,024 tokens."""


@pytest.mark.slow
def test_a_step_launches_and_moves_no_more_than_its_limits(tmp_path):
    subprocess.run(
        [sys.executable, BENCHMARK, "--shapes", "1", "--results", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=2900,
        check=True,
    )
    rows = json.loads((tmp_path / "counted.json").read_text())["rows"]
    parts = {row["part"]: row for row in rows if "part" in row}
    for name, (launches, megabytes) in LIMITS.items():
        assert 0 < parts[name]["launches"] <= launches, name
        assert 0 < parts[name]["mb"] <= megabytes, name
    # Counting must not lose the products: a layer has 6 times its matrices and tokens.
    matrices = 1024 * 128 * 2 * (16 + 8) + 3 * 1024 * 3072
    products = sum(parts[f"layer, {way}"]["gflop"] for way in ("forward", "backward"))
    assert products == pytest.approx(6 * matrices * 1024 / 1e9)
    products = sum(parts[f"head, {way}"]["gflop"] for way in ("forward", "backward"))
    # Forward again in backward.
    assert products == pytest.approx(8 * 151_936 * 1024 * 1024 / 1e9)
