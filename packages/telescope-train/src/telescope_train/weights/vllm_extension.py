"""vLLM loads this module into each of its workers: it registers the weight-transfer engine `gloo`.

The import registers the engine, because vLLM offers a worker extension no other hook before it
creates the engine that its configuration names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from telescope_train.weights.buckets import empty, in_buckets, size_bytes, unflattened
from telescope_train.weights.digests import Digests
from telescope_train.weights.gloo import GlooGroup, add_digests
from telescope_train.weights.vllm_adapter import load_adapter

if torch.cpu._is_amx_tile_supported():
    # Linux grants AMX to a process on request only. Without this, a bfloat16 model on a machine
    # with AMX dies of SIGILL at its first request.
    torch.cpu._init_amx()


class WorkerExtension:
    """What vLLM's workers can do besides. Naming it makes vLLM import this module."""

    weight_transfer_engine: "GlooEngine"
    model_runner: Any

    def received_digest(self) -> str:
        """Return the digest of the newest update that was received as a whole."""
        return self.weight_transfer_engine.received.whole()

    def received_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of that update, by name."""
        return self.weight_transfer_engine.received.by_name()

    def receive_adapter(self, update_info: dict[str, Any]) -> None:
        """Receive an adapter and put it in the place of the one before, in one call.

        Not `update_weights`: vLLM forgets all adapters at the end of an update of weights.
        """
        engine = self.weight_transfer_engine
        sent = engine.receive(engine.parse_update_info(update_info))
        load_adapter(self.model_runner.lora_manager, dict(sent))


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where trainer rank 0 waits, and which ranks this server's workers take."""

    host: str
    port: int
    world_size: int
    """Members of the group: trainer rank 0 and all workers."""
    rank_offset: int
    """The rank of this server's first worker."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Name, dtype and shape of each tensor, in the order in which they are sent.

    vLLM passes it as JSON, so dtypes are names and shapes are lists.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    """Sizes of each tensor in each dimension."""


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives weights over gloo and loads them in place, layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None
    """None before `init_transfer_engine` and after `shutdown`."""
    received = Digests()
    """Of the newest update that was received as a whole."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group; returns when all members have joined."""
        # The old group goes first: another member of it may have died.
        self._group = None
        # The number of this worker among those of its server, over data-parallel copies too.
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup(
            host=init_info.host,
            port=init_info.port,
            rank=init_info.rank_offset + rank,
            world_size=init_info.world_size,
        )

    def start_weight_update(self) -> None:
        """Bring every layer back into the form that weights are loaded into."""
        # vLLM processes weights after loading (on the CPU it packs matrices), so weights as Hugging
        # Face stores them cannot be written over the result.
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load weights; vLLM's own method needs an accelerator to synchronize with."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load each tensor as it arrives."""
        # From a generator: the next bucket is received when the loader asks for it, so the model is
        # never in memory twice.
        self.model.load_weights(self.receive(update_info))

    def finish_weight_update(self) -> None:
        """Bring every layer into its fast form again, including a tied head."""
        # The heads come last, because they are packed from embeddings that are in place by then.
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self._group = None

    def receive(self, info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) as they arrive; every worker must exhaust it."""
        if self._group is None:
            raise RuntimeError("weights were sent before init_weight_transfer_engine")
        forms = [(getattr(torch, d), s) for d, s in zip(info.dtypes, info.shapes, strict=True)]
        named = zip(info.names, forms, strict=True)
        digests = Digests()
        for bucket in in_buckets(named, lambda one: size_bytes(*one[1])):
            # A new buffer for each bucket: the loaders keep views of it until their layer is
            # complete, and the next broadcast would overwrite them.
            flat = empty([size_bytes(*form) for _, form in bucket])
            self._group.broadcast(flat)
            # Before the loaders get it: what they do with a buffer is theirs.
            add_digests(digests, flat, [(name, size_bytes(*form)) for name, form in bucket])
            names = [name for name, _ in bucket]
            yield from zip(names, unflattened(flat, [form for _, form in bucket]), strict=True)
        self.received = digests


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
if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
