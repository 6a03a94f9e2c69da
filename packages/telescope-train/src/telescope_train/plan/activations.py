"""Describe what layers keep for the backward pass, for the dry run. Imports no torch.

With `gradient_checkpointing = "auto"` the ranks decide by measurements; this is an estimate.
"""

from telescope_train.config.schema import TrainConfig
from telescope_train.models.facts import ModelFacts
from telescope_train.models.recomputed_layers import LayerBytes, fewest_recomputed, kept_bytes
from telescope_train.plan.gpus import CONTEXT_BYTES
from telescope_train.plan.memory import ACTIVATIONS, BYTES_PER_VALUE, layer_bytes, rank_memory
from telescope_train.plan.prepared import Prepared

GIB = 2**30
_WORDS = {
    False: "all kept",
    True: "recomputed in the backward pass, layer by layer",
    "full": "recomputed in the backward pass, layer by layer",
    "selective": "recomputed, except those of attention and matrix products",
}
_GPU_SHARE = 0.9
"""Share of a GPU's memory that ranks use."""


def how_activations_are_kept(prepared: Prepared) -> str:
    """Return what `gradient_checkpointing` means for this run on this machine."""
    config = prepared.config
    if config.trainer.train_backend == "megatron":
        return _WORDS[config.megatron.megatron_gradient_checkpointing]
    kind = config.trainer.gradient_checkpointing
    if kind != "auto":
        return _WORDS[kind]
    begin = "as few layers are recomputed as memory needs"
    layer = layer_bytes(config, prepared.facts, BYTES_PER_VALUE[prepared.dtype])
    room, reason = _room(prepared)
    if room is None or layer is None:
        return f"{begin}; {reason}"
    return f"{begin}: {_estimate(prepared.facts, layer, room, config)}; {reason}"


def _estimate(facts: ModelFacts, layer: LayerBytes, room: float, config: TrainConfig) -> str:
    num_layers = facts.num_layers or 0
    count = fewest_recomputed(num_layers, layer, room)
    kept = kept_bytes(num_layers, layer, count)
    return (
        f"about {count} of {num_layers} for a row of {config.trainer.seq_len} tokens, which keeps "
        f"{kept / GIB:.2f} GiB then and may keep {max(0.0, room) / GIB:.2f}"
    )


def _room(prepared: Prepared) -> tuple[float | None, str]:
    """Return the bytes that a rank may keep, if they are known, and how they were found."""
    given = prepared.config.trainer.activation_memory_gib
    if given is not None:
        return given * GIB, "activation_memory_gib"
    if prepared.device == "cpu":
        return None, "ranks use half of the memory that is free when they start"
    rank = rank_memory(prepared.config, prepared.facts, device=prepared.device)
    if rank is None or not all(prepared.gpus) or not prepared.gpus:
        return None, "ranks measure what weights, gradients and moments leave of their GPU"
    others = sum(size for name, size in rank.parts if name != ACTIVATIONS)
    left = _GPU_SHARE * min(prepared.gpus) - CONTEXT_BYTES - others
    return left, "what weights, gradients and moments leave of a GPU"
