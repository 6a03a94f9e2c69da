"""Print how the tensors of vLLM's models differ after an update from those of a fresh load.

`python served_update.py PLACE FAMILY...` loads each model PLACE/FAMILY-0, sends it the weights in
PLACE/FAMILY-1 twice, and prints the names of tensors that are not what a load of these gives, as
JSON by family. Before the updates come transfers that break off, each after one more tensor, and
their retries. It is a process of its own, because vLLM keeps process groups in globals.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
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


def weights_of(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(file).items()


def retried(engine: TelescopeEngine, folder: str, num_sent: int) -> None:
    """Update to `folder` after a transfer that broke off behind `num_sent` tensors."""

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(weights_of(folder), num_sent)
        raise RuntimeError("a member of the group has gone")

    engine.start_weight_update()
    with suppress(RuntimeError):
        engine.model.load_weights(broken())
    update(engine, folder)


def update(engine: TelescopeEngine, folder: str) -> None:
    engine.start_weight_update()
    engine.model.load_weights(weights_of(folder))
    engine.finish_weight_update()


def differing(folder: str, other: str) -> list[str]:
    model, config = loaded(folder)
    first = {name: one.clone() for name, one in tensors(model).items()}
    fresh = tensors(loaded(other)[0])
    settings: Any = SimpleNamespace(
        parallel_config=config.parallel_config, model_config=config.model_config
    )
    nothing: Any = None
    engine = TelescopeEngine(nothing, settings, torch.device("cpu"), model)
    found: list[str] = []

    def compare(expected: dict[str, torch.Tensor], how: str) -> None:
        updated = tensors(model)
        assert updated.keys() == expected.keys()
        wrong = [name for name, one in updated.items() if not torch.equal(one, expected[name])]
        found.extend(f"{name}{how}" for name in wrong)

    # To and fro, so that what is left of the weights before is seen.
    ends = itertools.cycle([(other, fresh), (folder, first)])
    for num_sent, (end, expected) in zip(range(len(list(weights_of(other)))), ends, strict=False):
        retried(engine, end, num_sent)
        compare(expected, f" after a break behind tensor {num_sent}")
    update(engine, folder)
    compare(first, " after the way back")
    for _ in range(2):
        update(engine, other)
    assert any(not torch.equal(one, first[name]) for name, one in tensors(model).items())
    compare(fresh, "")
    return found


def main() -> None:
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
    place, *families = sys.argv[1:]
    found = {one: differing(f"{place}/{one}-0", f"{place}/{one}-1") for one in families}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
