"""Print how the tensors of vLLM's models differ after an update from those of a fresh load.

`python served_update.py PLACE FAMILY...` loads each model PLACE/FAMILY-0, sends it the weights in
PLACE/FAMILY-1 twice, and prints the names of tensors that are not what a load of these gives, as
JSON by family. It is a process of its own, because vLLM keeps process groups in globals.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from telescope_train.weights.vllm_extension import TelescopeEngine


def loaded(folder: str) -> tuple[Any, Any]:
    """Return vLLM's model of `folder` and its settings."""
    config = EngineArgs(
        model=folder, enforce_eager=True, max_model_len=64, dtype="float32"
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            place = f"file://{tempfile.mkdtemp()}/meet"
            init_distributed_environment(1, 0, place, 0, backend="gloo")
            initialize_model_parallel(1, 1)
        return get_model(vllm_config=config), config


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differing(folder: str, other: str) -> list[str]:
    model, config = loaded(folder)
    fresh = tensors(loaded(other)[0])
    settings: Any = SimpleNamespace(
        parallel_config=config.parallel_config, model_config=config.model_config
    )
    nothing: Any = None
    engine = TelescopeEngine(nothing, settings, torch.device("cpu"), model)
    first = {name: one.clone() for name, one in tensors(model).items()}
    for _ in range(2):
        engine.start_weight_update()
        for file in sorted(Path(other).glob("*.safetensors")):
            model.load_weights(load_file(file).items())
        engine.finish_weight_update()
    updated = tensors(model)
    assert updated.keys() == fresh.keys()
    assert any(not torch.equal(one, first[name]) for name, one in updated.items())
    return [name for name, one in updated.items() if not torch.equal(one, fresh[name])]


def main() -> None:
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
    place, *families = sys.argv[1:]
    found = {one: differing(f"{place}/{one}-0", f"{place}/{one}-1") for one in families}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
