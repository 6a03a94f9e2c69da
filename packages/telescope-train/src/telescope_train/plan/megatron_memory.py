"""How much of a model a rank of backend `megatron` holds, and in what memory. Imports no torch.

Tensor-parallel ranks share every matrix but those of experts, pipeline stages the layers, and
expert-parallel ranks the experts. What is counted is the largest stage.
"""

from dataclasses import dataclass

from telescope_train.backends.megatron.layout import megatron_layout
from telescope_train.config.schema import TrainConfig
from telescope_train.models.facts import ModelFacts

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShare:
    """Parameters of one rank of the largest stage."""

    dense: float
    """Of embeddings, attention, norms and dense layers."""
    experts: float
    optimized: float
    """Parameters whose optimizer state this rank keeps."""

    @property
    def num_parameters(self) -> float:
        """All of them."""
        return self.dense + self.experts


def megatron_share(config: TrainConfig, facts: ModelFacts) -> MegatronShare:
    """Return what one rank holds; ConfigError if ranks cannot be laid out as the settings ask."""
    layout = megatron_layout(config.megatron, config.trainer.trainer_num_workers)
    embeddings = facts.num_embedding_parameters or 0
    experts = facts.num_expert_parameters or 0
    body = (facts.num_parameters or 0) - embeddings - experts
    # The first stage has the embeddings and the last one the head, tied or not.
    outside = embeddings if layout.pipeline == 1 else (facts.num_head_parameters or 0)
    dense = (body / layout.pipeline + outside) / layout.tensor
    of_experts = experts / (layout.pipeline * layout.expert)
    if not config.megatron.megatron_use_distributed_optimizer:
        optimized = dense + of_experts
    else:
        # Ranks that share rows have the same weights, so they divide the state too. Experts are
        # never divided by tensor, so there are more copies of each.
        copies = layout.data * layout.context
        optimized = dense / copies + of_experts * layout.expert / (copies * layout.tensor)
    return MegatronShare(dense=dense, experts=of_experts, optimized=optimized)


def megatron_state(
    config: TrainConfig, facts: ModelFacts, compute: int, *, on_gpu: bool
) -> list[tuple[str, int]]:
    """Return what a rank keeps between steps: what, and its bytes.

    `compute`: bytes of a number in the dtype of the layers. `on_gpu`: of this memory alone, without
    what is in that of the CPU.
    """
    megatron, share = config.megatron, megatron_share(config, facts)
    gradient = 4 if megatron.megatron_grad_reduce_in_fp32 else compute
    # Weights in float32 are updated in place; others have a copy that is.
    main, moments = (0 if compute == 4 else 4), 8
    if megatron.megatron_use_precision_aware_optimizer:
        main = main and _BYTES[megatron.megatron_main_params_dtype]
        names = (megatron.megatron_exp_avg_dtype, megatron.megatron_exp_avg_sq_dtype)
        moments = sum(_BYTES[name] for name in names)
    kept = 1.0
    if on_gpu and megatron.megatron_optimizer_cpu_offload:
        kept -= megatron.megatron_optimizer_offload_fraction
    parts = [
        ("weights", round(compute * share.num_parameters)),
        ("gradients", round(gradient * share.num_parameters)),
        ("Adam", round(kept * (main + moments) * share.optimized)),
    ]
    if config.algorithm.needs_reference:
        parts.append(("reference model", round(compute * share.num_parameters)))
    return parts


def megatron_activations(config: TrainConfig, facts: ModelFacts, compute: int) -> int | None:
    """Return what packed sequences leave for their backward pass, in bytes; None = unknown."""
    if not facts.num_layers or not facts.hidden_size or not facts.mlp_width:
        return None
    megatron = config.megatron
    layout = megatron_layout(megatron, config.trainer.trainer_num_workers)
    tokens = config.trainer.seq_len / layout.context
    heads = (facts.attention_width or 0) / facts.num_layers
    # What is between the matrices is whole on each tensor-parallel rank, or divided by tokens.
    between = layout.tensor if megatron.megatron_sequence_parallel else 1
    width = 6 * facts.hidden_size / between + (4 * heads + 3 * facts.mlp_width) / layout.tensor
    whole_layer = tokens * compute * width
    # The first stage holds one sequence for each stage until its backward pass comes, and has so
    # many fewer layers.
    if not megatron.megatron_gradient_checkpointing:
        return round(facts.num_layers * whole_layer)
    inputs = facts.num_layers * tokens * compute * facts.hidden_size / between
    return round(inputs + 2 * whole_layer)
