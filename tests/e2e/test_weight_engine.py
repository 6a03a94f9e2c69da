"""The engine in vLLM's workers that receives weights, without a trainer on the other side."""

import asyncio
import logging
import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telescope_train.models.device import cpu_has_amx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "models"))
from model_folders import save_model

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


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_layers_without_weights_of_their_own_may_get_none(is_tied, caplog):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from telescope_train.weights.vllm_extension import sent_nothing_to, unwarned_of

    class Head(ParallelLMHead):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.zeros(2, 2))

    table = torch.nn.Module()
    table.register_buffer("cos_sin_cache", torch.zeros(2))
    layers = {"head": Head(), "missed": torch.nn.Linear(2, 2), "table": table}
    model = torch.nn.ModuleDict(layers)
    for layer in layers.values():
        get_layerwise_info(layer).load_numel_total = 1
    found = sent_nothing_to(model, is_tied=is_tied)
    assert found == {"Module", *(["Head"] if is_tied else [])}
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addHandler(caplog.handler)
    with unwarned_of(found):
        for layer in layers.values():
            logger.warning("%s: Failed to load weights", type(layer).__name__)
    logger.removeHandler(caplog.handler)
    told = {one.getMessage().partition(":")[0] for one in caplog.records}
    assert told == {"Linear", *([] if is_tied else ["Head"])}


def test_every_engine_of_a_server_says_what_its_workers_hold(monkeypatch):
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    from telescope_train.inference.vllm_plugin.main import answer_for_every_engine

    asked: list[tuple[Any, ...]] = []

    class Engines(DPLBAsyncMPClient):
        def __init__(self) -> None: ...

        def __del__(self) -> None: ...

        async def call_utility_all_async(self, *question: Any) -> list[Any]:
            asked.append(question)
            return [["first", "first"], ["another", "first"]]

    before = DPLBAsyncMPClient.collective_rpc_async
    monkeypatch.setattr(DPLBAsyncMPClient, "collective_rpc_async", before, raising=False)
    answer_for_every_engine()
    found = asyncio.run(Engines().collective_rpc_async("received_digest", None))
    assert found == ["first", "first", "another", "first"]
    assert asked == [("collective_rpc", "received_digest", None, (), None)]


class Worker:
    """A worker of a server, with the queue of its answers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers = deque[tuple[Any, Any]]()

    def dequeue(self, timeout: float | None = None) -> tuple[Any, Any]:
        return self.answers.popleft()

    def execute(self, method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Do what `WorkerProc` does with a call."""
        from cloudpickle import loads
        from vllm.v1.executor.multiproc_executor import WorkerProc

        status = WorkerProc.ResponseStatus
        is_name = isinstance(method, str)
        function = getattr(self, method) if is_name else partial(loads(method), self)
        try:
            self.answers.append((status.SUCCESS, function(*arguments, **named)))
        except RuntimeError as error:
            self.answers.append((status.FAILURE, str(error)))

    def update_weights(self) -> None:
        raise RuntimeError(f"worker {self.number} lost the trainer")

    def received_digest(self, *, prefix: str) -> str:
        return f"{prefix}{self.number}"


def test_workers_of_a_server_stay_in_step_after_a_call_that_failed():
    from telescope_train.inference.vllm_plugin.executor import EveryAnswer

    class Executor(EveryAnswer):
        def __init__(self, num_workers: int) -> None:
            self.is_failed, self.futures_queue = False, deque()
            self.response_mqs: Any = [Worker(number) for number in range(num_workers)]
            self.rpc_broadcast_mq: Any = self

        def __del__(self) -> None: ...

        def enqueue(self, call: tuple[Any, ...]) -> None:
            *parts, output_rank = call
            for worker in self.response_mqs:
                if output_rank in (None, worker.number):
                    worker.execute(*parts)

    executor = Executor(3)
    ask = partial(executor.collective_rpc, "received_digest", kwargs={"prefix": "digest "})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker 0 lost the trainer"):
            executor.collective_rpc("update_weights")
        assert ask() == ["digest 0", "digest 1", "digest 2"]
    assert ask(unique_reply_rank=1) == "digest 1"
    assert not any(worker.answers for worker in executor.response_mqs)


@pytest.fixture
def as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's worker for CPUs does."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Qwen3Moe", {"num_hidden_layers": 1}),
        ("Mixtral", {"num_hidden_layers": 1}),
        ("Qwen3", {"num_hidden_layers": 1}),
        ("Gemma4Text", {}),
    ],
)
def test_an_update_leaves_what_a_fresh_load_of_its_weights_gives(tmp_path, family, fields) -> None:
    from served_update import differing

    folders = [save_model(family, tmp_path / str(n), seed=n, **fields) for n in range(2)]
    assert differing(*map(str, folders)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cpu")
@pytest.mark.skipif(not cpu_has_amx(), reason="vLLM rounds to 8 bits on a CPU with AMX only")
def test_an_update_is_rounded_to_8_bits_as_a_fresh_load_is(tmp_path, monkeypatch) -> None:
    """`test_quantized_rollouts` trains over such a server."""
    from served_update import differing

    # Compiling how numbers are rounded takes longer than all of this.
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    folders = [save_model("Qwen3", tmp_path / str(n), seed=n, **sizes) for n in range(2)]
    in_8_bits = {"dtype": "bfloat16", "quantization": "fp8_per_block"}
    assert differing(*map(str, folders), **in_8_bits) == []
