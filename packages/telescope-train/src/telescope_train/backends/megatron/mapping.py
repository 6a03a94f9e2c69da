"""The relation between the parameters of Megatron's model and Hugging Face tensors.

Both directions are exact: tensors are only cut, joined and reordered. Megatron keeps queries, keys
and values in one matrix, interleaved by key-value head, and the gate and up projections in another,
one below the other. Tensors have the names that they have in model files on the Hub.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from telescope_train.backends.megatron.architecture import Architecture
from telescope_train.models.file_names import EXPERT_NAMES

Form: TypeAlias = Literal["plain", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """One parameter of Megatron's model, or one expert of a parameter that holds several."""

    name: str
    """Name of the parameter, with the layer's number in the whole model."""
    sources: tuple[str, ...]
    """Names of the Hugging Face tensors that it is made of."""
    form: Form = "plain"
    split: Literal[0, 1] | None = None
    """Dimension that tensor-parallel ranks divide; None = each holds all of it."""
    layer: int | None = None
    """Number of its layer; None = outside the layers."""
    expert: int | None = None
    """Number of the expert; None = it belongs to no expert."""
    is_padded: bool = False
    """Whether it has one row for each token, followed by rows of padding."""


def parts_of(architecture: Architecture) -> list[WeightPart]:
    """Return all parts of the model, in the order of a forward pass."""
    parts = [
        WeightPart(
            name="embedding.word_embeddings.weight",
            sources=("model.embed_tokens.weight",),
            split=0,
            is_padded=True,
        )
    ]
    for layer in range(architecture.num_layers):
        parts += _layer_parts(architecture, layer)
    parts.append(WeightPart(name="decoder.final_layernorm.weight", sources=("model.norm.weight",)))
    if not architecture.is_tied:
        parts.append(
            WeightPart(
                name="output_layer.weight", sources=("lm_head.weight",), split=0, is_padded=True
            )
        )
    return parts


def _layer_parts(architecture: Architecture, layer: int) -> list[WeightPart]:
    here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."

    def part(
        name: str, *sources: str, form: Form = "plain", split: Literal[0, 1] | None = None
    ) -> WeightPart:
        return WeightPart(
            name=here + name,
            sources=tuple(there + source for source in sources),
            form=form,
            split=split,
            layer=layer,
        )

    projections = ("q_proj", "k_proj", "v_proj")
    parts = [part("input_layernorm.weight", "input_layernorm.weight")]
    for kind in ("weight", "bias") if architecture.has_qkv_bias else ("weight",):
        sources = [f"self_attn.{one}.{kind}" for one in projections]
        parts.append(part(f"self_attention.linear_qkv.{kind}", *sources, form="qkv", split=0))
    if architecture.has_qk_norm:
        parts.append(part("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"))
        parts.append(part("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"))
    parts.append(part("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split=1))
    parts.append(part("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"))
    if architecture.num_experts is not None:
        return [*parts, *_expert_parts(architecture, layer)]
    pair = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    parts.append(part("mlp.linear_fc1.weight", *pair, form="gate_up", split=0))
    parts.append(part("mlp.linear_fc2.weight", "mlp.down_proj.weight", split=1))
    return parts


def _expert_parts(architecture: Architecture, layer: int) -> list[WeightPart]:
    here, there = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}."
    names = EXPERT_NAMES[architecture.family]
    parts = [
        WeightPart(
            name=f"{here}router.weight", sources=(f"{there}{names.block}.gate.weight",), layer=layer
        )
    ]
    for expert in range(architecture.num_experts or 0):
        prefix = f"{there}{names.block}.experts.{expert}."
        parts.append(
            WeightPart(
                name=f"{here}experts.fc1",
                sources=(f"{prefix}{names.gate}.weight", f"{prefix}{names.up}.weight"),
                form="gate_up",
                layer=layer,
                expert=expert,
            )
        )
        parts.append(
            WeightPart(
                name=f"{here}experts.fc2",
                sources=(f"{prefix}{names.down}.weight",),
                layer=layer,
                expert=expert,
            )
        )
    return parts


def join(
    part: WeightPart, tensors: Sequence[torch.Tensor], architecture: Architecture
) -> torch.Tensor:
    """Build the whole parameter from its Hugging Face tensors, in the order of `sources`."""
    if part.form == "qkv":
        # Each key-value head with the queries that attend to it, so that ranks can divide them.
        groups, size = architecture.num_kv_heads, architecture.head_dim
        rest = tensors[0].shape[1:]
        by_group = [
            tensor.reshape(groups, len(tensor) // (groups * size) * size, *rest)
            for tensor in tensors
        ]
        return torch.cat(by_group, 1).reshape(-1, *rest)
    if part.form == "gate_up":
        return torch.cat(list(tensors))
    (value,) = tensors
    if part.is_padded:
        padding = architecture.padded_vocab_size - len(value)
        return torch.cat([value, value.new_zeros(padding, *value.shape[1:])])
    return value


def take_apart(
    part: WeightPart, value: torch.Tensor, architecture: Architecture
) -> list[torch.Tensor]:
    """Split a whole parameter into its Hugging Face tensors, in the order of `sources`."""
    if part.form == "qkv":
        groups, size = architecture.num_kv_heads, architecture.head_dim
        queries = architecture.num_heads // groups * size
        rest = value.shape[1:]
        by_group = value.reshape(groups, queries + 2 * size, *rest)
        pieces = by_group.split([queries, size, size], 1)
        return [piece.reshape(-1, *rest) for piece in pieces]
    if part.form == "gate_up":
        return list(value.chunk(2))
    return [value[: architecture.vocab_size] if part.is_padded else value]


def shard(part: WeightPart, value: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the part of a whole parameter that tensor-parallel rank `rank` of `size` holds."""
    if part.split is None or size == 1:
        return value
    if part.form == "gate_up":
        # Each rank needs both halves for its columns.
        return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    return value.chunk(size, part.split)[rank]


def unshard(part: WeightPart, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Build the whole parameter from the shards of all tensor-parallel ranks, in their order."""
    if part.split is None or len(shards) == 1:
        return shards[0]
    if part.form == "gate_up":
        halves = [value.chunk(2) for value in shards]
        return torch.cat([torch.cat([half[side] for half in halves]) for side in (0, 1)])
    return torch.cat(list(shards), part.split)


def whole_shape(part: WeightPart, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of the whole parameter, or of one expert of it."""
    hidden, size = architecture.hidden_size, architecture.head_dim
    queries = architecture.num_heads * size
    both = queries + 2 * architecture.num_kv_heads * size
    name = part.name.rpartition("layers.")[2].partition(".")[2] if part.layer is not None else ""
    if part.is_padded:
        return (architecture.padded_vocab_size, hidden)
    if part.expert is not None:
        columns = architecture.expert_ffn_size
        return (2 * columns, hidden) if part.form == "gate_up" else (hidden, columns)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (both, hidden),
        "self_attention.linear_qkv.bias": (both,),
        "self_attention.q_layernorm.weight": (size,),
        "self_attention.k_layernorm.weight": (size,),
        "self_attention.linear_proj.weight": (hidden, queries),
        "mlp.linear_fc1.weight": (2 * architecture.ffn_size, hidden),
        "mlp.linear_fc2.weight": (hidden, architecture.ffn_size),
        "mlp.router.weight": (architecture.num_experts or 0, hidden),
    }
    # Norms are all that is left.
    return shapes.get(name, (hidden,))


def hugging_face_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the Hugging Face model, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for part in parts_of(architecture):
        # Without memory: only the shapes are wanted.
        whole = torch.empty(whole_shape(part, architecture), device="meta")
        pieces = take_apart(part, whole, architecture)
        found |= {
            name: tuple(piece.shape) for name, piece in zip(part.sources, pieces, strict=True)
        }
    return found
