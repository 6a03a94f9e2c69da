"""How the tensors of vLLM's models differ after an update from those of a fresh load.

Before the updates come transfers that break off, each after one more tensor, and their retries.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import ModelRegistry

from telescope_train.weights.vllm_extension import TelescopeEngine


@contextmanager
def one_process(config: Any) -> Iterator[None]:
    """Make vLLM's process groups, which it keeps in globals, and end them."""
    place = f"file://{tempfile.mkdtemp()}/meet"
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, place, 0, backend="gloo")
            initialize_model_parallel(1, 1)
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def config_of(folder: str, more: dict[str, Any]) -> Any:
    """Return vLLM's settings for the model of `folder`."""
    (name,) = json.loads(Path(folder, "config.json").read_text())["architectures"]
    lazy = ModelRegistry.models[name]
    if hasattr(lazy, "load_model_cls"):
        # A class is looked at here; one by name in another Python, which imports vLLM for it.
        ModelRegistry.register_model(name, lazy.load_model_cls())
    arguments = {"enforce_eager": True, "max_model_len": 64, "dtype": "float32", **more}
    return EngineArgs(model=folder, **arguments).create_engine_config()


def loaded(config: Any) -> Any:
    """Return vLLM's model."""
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


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


def differing(folder: str, other: str, **more: Any) -> list[str]:
    """Return the tensors of the model of `folder` that are wrong after updates to `other` and back.

    `more`: vLLM's arguments.
    """
    config = config_of(folder, more)
    with one_process(config):
        return _differing(folder, other, config, loaded(config_of(other, more)))


def _differing(folder: str, other: str, config: Any, target: torch.nn.Module) -> list[str]:
    model = loaded(config)
    first = {name: one.clone() for name, one in tensors(model).items()}
    fresh = tensors(target)
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
