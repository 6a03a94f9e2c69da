"""Estimate the memory of a rank of backend `megatron`, from `config.json`. Imports no torch.

A rank holds its part of the layers in the type that they compute in, buffers for the gradients of
all that it holds, and its share of the optimizer's state. Counted for the largest stage.
"""

from dataclasses import dataclass

from telescope_train.backends.megatron.layout import megatron_layout
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.megatron_section import MegatronSection
from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import Device
from telescope_train.models.facts import ModelFacts

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class _Held:
    """Numbers of parameters that a rank holds."""

    dense: int
    """Parameters of layers without experts, embeddings and head."""
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts


def megatron_state(
    config: TrainConfig, facts: ModelFacts, compute: int, *, device: Device
) -> list[tuple[str, int]]:
    """Return the bytes of the model on a rank; `compute`: bytes of a number in layers."""
    section = config.megatron
    layout = megatron_layout(section, config.trainer.trainer_num_workers)
    held = _held(facts, layout)
    is_low = compute < _BYTES["float32"]
    gradient = 4 if is_low and section.megatron_grad_reduce_in_fp32 else compute
    adam = _optimizer_bytes(section, is_low=is_low) * _stepped(held, layout, section)
    if device == "cuda" and section.megatron_optimizer_cpu_offload:
        adam *= 1 - section.megatron_optimizer_offload_fraction
    parts = [
        ("weights", compute * held.all),
        ("gradient buffers", gradient * held.all),
        ("Adam", round(adam)),
    ]
    if config.algorithm.needs_reference:
        parts.append(("reference model", compute * held.all))
    return parts


def megatron_activations(config: TrainConfig, facts: ModelFacts, compute: int) -> int | None:
    """Return the bytes of rows in flight for their backward pass; None = sizes unknown.

    The first of P stages works on P rows at once, and has a P-th of the layers.
    """
    if not facts.num_layers or not facts.hidden_size or not facts.mlp_width:
        return None
    section = config.megatron
    tensor = section.megatron_tensor_parallel_size
    tokens = config.trainer.seq_len // section.megatron_context_parallel_size
    between = 6 * facts.hidden_size // (tensor if section.megatron_sequence_parallel else 1)
    heads = (facts.attention_width or 0) // facts.num_layers
    layer = tokens * compute * (between + (4 * heads + 3 * facts.mlp_width) // tensor)
    if not section.megatron_gradient_checkpointing:
        return facts.num_layers * layer
    return facts.num_layers * tokens * compute * between // 6 + layer


def _held(facts: ModelFacts, layout: RankLayout) -> _Held:
    total, head = facts.num_parameters or 0, facts.num_head_parameters or 0
    body = facts.num_body_parameters or total
    # A mixture's embedding and head are counted apart, as if they were not tied. Its experts are
    # those that a token is not sent to: the few others are counted with what tensor parallelism
    # divides.
    outside = min(2 * head, total - body) if facts.num_experts else total - body
    experts = max(0, total - body - outside)
    if layout.pipeline > 1:
        outside = min(outside, head)  # the first stage has the one and the last stage the other
    return _Held(
        dense=(body // layout.pipeline + outside) // layout.tensor,
        experts=experts // (layout.pipeline * layout.expert),
    )


def _stepped(held: _Held, layout: RankLayout, section: MegatronSection) -> int:
    """Return the number of parameters for which a rank keeps optimizer state."""
    if not section.megatron_use_distributed_optimizer:
        return held.all
    stage = layout.num_ranks // layout.pipeline
    return held.dense // (layout.data * layout.context) + held.experts // (stage // layout.expert)


def _optimizer_bytes(section: MegatronSection, *, is_low: bool) -> int:
    """Return the bytes of one parameter's state: two moments, and wide weights if needed."""
    if dtypes := section.megatron_optimizer_dtypes:
        return sum(_BYTES[dtypes[name]] for name in ("main_params", "exp_avg", "exp_avg_sq"))
    return 12 if is_low else 8
