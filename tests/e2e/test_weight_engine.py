"""The engine in vLLM's workers that receives weights, without a trainer on the other side."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine
ONE = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[2, 2]]}


class Model:
    """Takes all weights that it is given."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded = dict(weights)


@pytest.fixture
def engine() -> Any:
    from telescope_train.weights.vllm_extension import TelescopeEngine

    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    nothing: Any = None
    made = TelescopeEngine(nothing, config, torch.device("cpu"), Model())
    yield made
    assert made.model.loaded == {}, "a refused update reached the model"


def test_weights_before_the_group_is_there_are_refused(engine):
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        engine.update_weights(ONE)


def test_an_adapter_before_the_group_is_there_is_refused(engine):
    from telescope_train.weights.vllm_extension import WorkerExtension

    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(lora_manager=None)
    worker.weight_transfer_engine = engine
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        worker.receive_adapter(ONE)


def test_weights_after_the_group_was_left_are_refused(engine):
    engine.shutdown()
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        engine.update_weights(ONE)
