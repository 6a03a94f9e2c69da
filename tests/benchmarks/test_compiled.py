"""The kernels of a step compile for a GPU as they are launched, and fit into its registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with vLLM and with torch for CUDA")
BENCHMARK = Path(__file__).parents[2] / "benchmarks/bench_compiled.py"
KERNELS = {
    *("rms_norm", "rms_norm_backward", "rotate", "gate", "gate_backward", "fold"),
    "logits_gradient",
}


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_card_and_spills_no_registers(tmp_path):
    subprocess.run(
        [sys.executable, BENCHMARK, "--cards", "90", "--results", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        timeout=2900,
        check=True,
    )
    rows = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    for row in rows:
        assert row["spilled"] == 0, row
        # With fewer, reading waits for memory more than it is read from.
        assert row["warps"] >= 16, row
