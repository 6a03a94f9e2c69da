"""Compiled decoder layers give the numbers of the others; slow, because they are compiled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_train.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[1]

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
from backend_cases import backend_settings, grpo_batches, relative_difference
from torch._dynamo.utils import counters
from telescope_train.trainer.worker import TrainerWorker

def gradient(**options):
    worker = TrainerWorker(backend_settings(sys.argv[1], gradient_checkpointing=False, **options))
    for seq_len in (64, 128):
        worker.backend.accumulate_gradient(grpo_batches(seq_len=seq_len)[0], version=0)
    found = {name: value.numpy().copy() for name, value in worker.backend.export_gradient()}
    worker.close()
    return found

eager = gradient()
compiled = gradient(compile=True)
print(json.dumps({
    "difference": relative_difference(compiled, eager),
    "same_names": list(eager) == list(compiled),
    "graphs": counters["stats"]["unique_graphs"],
}))
"""


def test_compiled_layers_give_the_same_gradient(tmp_path):
    """In a process of its own: what the compiler leaves behind would reach other tests."""
    model = make_tiny_model(tmp_path / "tiny", seed=0)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(HERE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same_names"]
    assert 0 < found["difference"] < 1e-5
    assert 0 < found["graphs"] < 20
