"""Compiled decoder layers give the numbers of the others; slow, because they are compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[1]

SCRIPT = """
import json, sys
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
from backend_cases import backend_settings, grpo_batches, relative_difference
from torch._dynamo.utils import counters
from telescope_train.config.schema import AlgorithmSection
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
num_graphs = counters["stats"]["unique_graphs"]

settings = backend_settings(sys.argv[1], gradient_checkpointing=True, compile=True)
model = settings.model.model_copy(update={"mixed_precision_dtype": "bfloat16"})
algorithm = AlgorithmSection(use_tis=True, kl_penalty_tau=0.1)
worker = TrainerWorker(replace(settings, model=model, algorithm=algorithm))
(reference,) = (one for one in worker.self_tests if one.name.startswith("reference"))
(batches,) = grpo_batches(seq_len=128)
batches = [
    replace(batch, behavior_logprobs_T=logprobs_T, reference_logprobs_T=reference_T)
    for batch, logprobs_T, reference_T in zip(
        batches, worker.logprobs(batches), worker.reference_logprobs(batches)
    )
]
weight = worker.backend.accumulate_gradient(batches, version=0).metrics["importance_weight"]
print(json.dumps({
    "difference": relative_difference(compiled, eager),
    "same_names": list(eager) == list(compiled),
    "graphs": num_graphs,
    "in bfloat16": [weight.lowest, weight.highest, reference.value],
}))
"""
PLAIN_CODE = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""No instructions of this CPU are tried and no processes started: both take longer than a layer."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process of its own printed: what the compiler leaves behind stays there.

    No size of the model is a number of tokens of the self-tests. Torch takes equal sizes for one,
    and compiles again when they differ.
    """
    model = make_tiny_model(tmp_path_factory.mktemp("compiled") / "tiny", seed=0)
    sizes = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 10}
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(model, **sizes)).save_pretrained(model)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(HERE)],
        env={**os.environ, **PLAIN_CODE},
        capture_output=True,
        text=True,
        check=False,
        timeout=2900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_compiled_layers_give_the_same_gradient(found):
    assert found["same_names"]
    assert 0 < found["difference"] < 1e-5
    assert 0 < found["graphs"] < 8, "graphs of a layer serve all of them, and any length"


def test_a_batch_is_compared_with_log_probs_of_the_graph_that_is_trained(found):
    """In bfloat16, where another graph rounds otherwise: the self-tests of the start pass, too.

    The reference has that graph as well, so a penalty measures weights and no rounding.
    """
    assert found["in bfloat16"] == [1.0, 1.0, 0.0]
