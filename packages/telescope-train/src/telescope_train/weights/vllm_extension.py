"""vLLM loads this module into each of its workers: it registers the weight-transfer engine.

The import registers the engine, because vLLM offers a worker extension no other hook before it
creates the engine that its configuration names. One engine serves every transport: the driver names
the transport when both sides meet.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from telescope_train.backends.transfer import Place, TensorHeader
from telescope_train.inference.vllm_plugin.adapter import ADAPTER_ID
from telescope_train.inference.wire import WEIGHT_ENGINE
from telescope_train.weights.digests import Digests
from telescope_train.weights.transport import Receiver, load_transport, receive

_NO_WEIGHTS = "%s: Failed to load weights"
if torch.cpu._is_amx_tile_supported():
    # Linux grants AMX to a process on request only. Without this, a bfloat16 model on a machine
    # with AMX dies of SIGILL at its first request.
    torch.cpu._init_amx()


class WorkerExtension:
    """Methods added to vLLM's workers. Naming the class makes vLLM import this module."""

    weight_transfer_engine: "TelescopeEngine"
    model_runner: Any

    def received_digest(self) -> str:
        """Return the digest of the newest complete update."""
        return self.weight_transfer_engine.received.whole()

    def received_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of that update, by name."""
        return self.weight_transfer_engine.received.by_name()

    def receive_adapter(self, update_info: dict[str, Any]) -> None:
        """Receive an adapter and replace the previous one, in one call.

        Not `update_weights`: vLLM forgets all adapters at the end of an update of weights.
        """
        engine = self.weight_transfer_engine
        sent = engine.receive(engine.parse_update_info(update_info))
        load_adapter(self.model_runner.lora_manager, dict(sent))


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Meeting place with trainer rank 0, and member numbers of this server's workers."""

    place: dict[str, Any]
    """A `Place` as JSON."""
    rank_offset: int
    """Number of this server's first worker among all members."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Name, dtype and shape of each tensor, in the order in which they are sent.

    vLLM passes it as JSON, so dtypes are names and shapes are lists. The names of the fields are
    the same as in vLLM's own engines.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    """Sizes of each tensor in each dimension."""

    def headers(self) -> list[TensorHeader]:
        """Return the same as one header per tensor."""
        rows = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [
            TensorHeader(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in rows
        ]


class TelescopeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights and loads them in place, layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _receiver: Receiver | None = None
    """None before `init_transfer_engine` and after `shutdown`."""
    _bucket_bytes = 0
    _kernels: Sequence[tuple[Any, Any]] = ()
    """What `without_kernels` took away for the present update."""
    received = Digests()
    """Digests of the newest complete update."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer; returns when all members have joined."""
        # The old group goes first: another member of it may have died.
        self.shutdown()
        # The number of this worker among those of its server, over data-parallel copies too.
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        place = Place.from_json(init_info.place)
        transport = load_transport(place.wire.transport)
        self._bucket_bytes = place.wire.bucket_bytes
        self._receiver = transport.receiver(
            place, rank=init_info.rank_offset + rank, device=self.device
        )

    def start_weight_update(self) -> None:
        """Convert every layer back to the form into which weights are loaded."""
        # vLLM processes weights after loading (on the CPU it packs matrices), so weights as Hugging
        # Face stores them cannot be written over the result.
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        forget_broken_update(self.model)
        self._give_kernels_back()
        if self.device.type == "cpu":
            self._kernels = without_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load weights; vLLM's own method needs an accelerator to synchronize with."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the next step reads them, from another stream perhaps

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load each tensor as it arrives."""
        # From a generator: the next bucket is received when the loader asks for it, so the model is
        # never in memory twice.
        self.model.load_weights(self.receive(update_info))

    def finish_weight_update(self) -> None:
        """Convert every layer to its fast form again, including a tied head."""
        # The heads come last, because they are packed from embeddings that are in place by then.
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        with unwarned_of(sent_nothing_to(self.model, is_tied=is_tied)):
            finalize_layerwise_reload(self.model, self.model_config)
        self._give_kernels_back()
        repack_heads(self.model)

    def _give_kernels_back(self) -> None:
        """Return the kernels of layers that nothing was sent to."""
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self._kernels = ()

    def shutdown(self) -> None:
        """Disconnect from the trainer. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def receive(self, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) as they arrive; every worker must exhaust it."""
        if self._receiver is None:
            raise RuntimeError("weights were sent before init_weight_transfer_engine")
        digests = Digests()
        yield from receive(self._receiver, info.headers(), digests, bucket_bytes=self._bucket_bytes)
        self.received = digests


def forget_broken_update(model: torch.nn.Module) -> None:
    """Drop what an update that did not end has left in layers, and put their tensors back.

    vLLM begins an update only of layers that are in none. The next one would count the tensors that
    a layer got before the break, take it for complete too early, and drop the rest.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        LOADING_LAYERS,
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()


def sent_nothing_to(model: torch.nn.Module, *, is_tied: bool) -> set[str]:
    """Return the layer classes without weights of their own that an update could bring.

    Those are layers without parameters (such as tables of rotations), and the head of a model whose
    head is the embedding. Called before the end of an update.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names: set[str] = set()
    missed: set[str] = set()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel <= 0:
            is_none = not any(True for _ in layer.parameters(recurse=False))
            is_none = is_none or (is_tied and isinstance(layer, ParallelLMHead))
            (names if is_none else missed).add(type(layer).__name__)
    return names - missed


@contextmanager
def unwarned_of(classes: set[str]) -> Iterator[None]:
    """Drop vLLM's warning that layers of these classes got no weights, within the context.

    It is logged twice with every update, and would hide a justified warning.
    """

    def is_true(record: logging.LogRecord) -> bool:
        names = record.args if isinstance(record.args, tuple) else ()
        return record.msg != _NO_WEIGHTS or not classes.issuperset(map(str, names))

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


def without_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Take the kernels of experts away and return them, each with the method that had it.

    On the CPU vLLM packs the matrices of experts for its kernel, but only where there is no kernel
    yet: those of an update would stay as they are, and be read as if they were packed.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    had = [(one, one.moe_kernel) for one in methods if getattr(one, "moe_kernel", None)]
    for method, _ in had:
        method.moe_kernel = None
    return had


def repack_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed matrix of every embedding that also serves as the output head.

    On the CPU vLLM packs the head for its matrix multiplication. With tied embeddings the layerwise
    reload updates the embedding but not that packed copy, so the logits would still be computed
    with the old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            # The weight stays, because the embedding looks up its rows in it.
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


# Registering a name twice is an error, for example if the module is reloaded.
if WEIGHT_ENGINE not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(WEIGHT_ENGINE, TelescopeEngine)


def load_adapter(worker_manager: WorkerLoRAManager, tensors: dict[str, Tensor]) -> None:
    """Make `tensors` the adapter of every request; names are those of a peft file.

    vLLM loads adapters from folders only. These come from memory and go through the same steps:
    packed for fused layers, cast to the dtype of adapters, copied into the slot of the adapter.
    Raises RuntimeError if the model has no place for one of them.
    """
    manager = worker_manager._adapter_manager
    # A scale of 1, because the trainer sends it as a part of the matrices.
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    described = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        described,
        device="cpu",
        dtype=worker_manager.lora_config.lora_dtype,
        weights_mapper=_renames(manager.model),
    )
    # The slot that becomes free is the one that is filled: the matrices that kernels, and on a GPU
    # captured graphs, read stay where they are.
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    # vLLM passes over what it cannot place, and would sample without it.
    if homeless := sorted(adapter.loras.keys() - manager.modules.keys()):
        raise RuntimeError(
            f"this model has no place for the adapters of {', '.join(homeless[:3])}; set "
            'lora_transfer = "merged"'
        )


def _renames(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
