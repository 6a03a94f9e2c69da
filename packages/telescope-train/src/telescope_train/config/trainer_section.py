"""The settings of `[trainer]` and `[megatron]`: the optimizer, and how ranks share the model."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from telescope_train.config.fields import Count, Index, NotNegative, Positive, Ratio, Section

Optimizer: TypeAlias = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
CheckpointingChoice: TypeAlias = Literal["full", "selective", "auto"]


def _known_shape(shape: object) -> object:
    if shape == "none":
        raise ValueError(
            "expected constant (with warmup_steps = 0, as 'none' was), linear or cosine"
        )
    if shape in ("wsd", "WSD", "warmup_stable_decay"):
        raise ValueError("expected linear or cosine, with cooldown_steps for warmup-stable-decay")
    return shape


LearningRateShape: TypeAlias = Annotated[
    Literal["constant", "linear", "cosine"], BeforeValidator(_known_shape)
]
LoraTargets: TypeAlias = Annotated[tuple[str, ...], Field(min_length=1)]
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All matrices of the decoder layers of Llama, Qwen, Mistral and models built like them."""

MUON_BATCH_VALUES = 2**24
"""Values that a rank orthogonalizes at one time, if they are of more than one matrix."""


class TrainerSection(Section):
    """The optimizer and the trainer processes."""

    train_backend: str = "fsdp"
    """Name of an installed backend."""
    trainer_num_workers: Count = 1
    """Number of trainer processes (ranks); each one takes a GPU if there are GPUs."""
    optimizer: Optimizer = "adamw"
    """AdamW with moments of 32, 16 or 8 bits; `adamw_8bit` needs a GPU and torchao. `muon`: Muon
    for the matrices of the layers, AdamW for the rest."""
    optimizer_cpu_offload: bool = False
    """Keep the moments of `adamw` in CPU memory and step there; needs a GPU."""
    gradient_checkpointing: bool | CheckpointingChoice = True
    """Recompute activations in the backward pass instead of keeping them: all of them (`full`,
    true), all except those of attention and matrix products (`selective`), or those of as few
    layers as memory needs (`auto`)."""
    activation_memory_gib: Positive | None = None
    """GiB that a rank may keep for a backward pass, with `gradient_checkpointing = "auto"`; null =
    what is left of its GPU, or half of what is free in the machine, divided among the ranks."""
    learning_rate: Positive = 1e-6
    """Peak learning rate; the same for AdamW and Muon."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; norms and biases have none."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment; each at least 0 and below 1."""
    adam_eps: Positive = 1e-8
    """Added to the denominator of AdamW's update."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the only moment of matrices, with `optimizer = "muon"`."""
    grad_clip: NotNegative = 1.0
    """Largest global gradient norm; 0 = measure the norm but do not clip."""
    lr_scheduler: LearningRateShape = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_steps: Index = 0
    """Optimizer steps over which the learning rate rises, from 1 / `warmup_steps` of its peak."""
    cooldown_steps: Count | None = None
    """Optimizer steps at the end over which `linear` and `cosine` fall, after a constant rate
    (warmup-stable-decay); null = all after warm-up."""
    min_lr_ratio: Ratio = 0.0
    """Share of the peak learning rate that `linear` and `cosine` reach just after the last step."""
    seq_len: Count = 4096
    """Tokens in one packed sequence; a longer sample cannot be trained on."""
    share_prefixes: Literal["auto", False] = "auto"
    """Compute tokens once that several samples of an optimizer step begin with; `auto` does so
    wherever the model and the backend can."""
    entropy_chunk_size: Count = 1024
    """Tokens whose logits a CPU holds at one time while log-probs and entropy are computed. A GPU
    holds 2^25 logits, 128 MiB, of as many tokens as there are."""
    pad_to_multiple_of: Count = 1
    """Pad the end of each packed sequence to a multiple of this many tokens."""
    routing_replay: bool = False
    """Send each token of a mixture of experts to those that the server chose; needs a GPU."""
    compile: bool = False
    """Compile the decoder layers; needs a compiler, and the first steps take minutes longer."""
    fsdp_context_parallel_size: Count = 1
    """Ranks that share each packed sequence; each takes a slice of its tokens."""
    fsdp_replicate_size: Count = 1
    """Whole copies of the model (HSDP): each is sharded over trainer_num_workers divided by this
    many ranks, best those of one node, and only the sums of gradients pass between copies, once in
    an optimizer step."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and moments in CPU memory between uses and step there; needs a
    GPU."""
    use_lora: bool = False
    """Freeze the model and train low-rank adapters beside its matrices."""
    lora_rank: Count = 16
    """Rank of each adapter, with `use_lora`."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by this over `lora_rank`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped at random during training."""
    lora_target_modules: LoraTargets = LORA_TARGETS
    """Matrices of the decoder layers that get an adapter."""


_OPTIMIZER_DTYPES = {
    "main_grads": ("float32", "bfloat16"),
    "main_params": ("float32", "float16"),
    "exp_avg": ("float32", "float16", "bfloat16", "fp8"),
    "exp_avg_sq": ("float32", "float16", "bfloat16", "fp8"),
}
"""Part of the optimizer -> types that it may have."""


def _all_dtypes(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the type of each part of the optimizer; float32 if none is given."""
    if given is None:
        return None
    for name, dtype in given.items():
        if name not in _OPTIMIZER_DTYPES:
            raise ValueError(f"expected keys among {', '.join(_OPTIMIZER_DTYPES)}")
        if dtype not in _OPTIMIZER_DTYPES[name]:
            allowed = ", ".join(_OPTIMIZER_DTYPES[name])
            raise ValueError(f"{name}: expected one of {allowed}")
    return dict.fromkeys(_OPTIMIZER_DTYPES, "float32") | dict(given)


OptimizerDtypes: TypeAlias = Annotated[dict[str, str] | None, AfterValidator(_all_dtypes)]


class MegatronSection(Section):
    """The division of the model over ranks with `train_backend = "megatron"`, and its optimizer.

    The number of data-parallel ranks follows: `trainer_num_workers` over the product of the tensor,
    pipeline and context parallel sizes.
    """

    megatron_tensor_parallel_size: Count = 1
    """Ranks that share every matrix of a layer; they should be in one machine."""
    megatron_pipeline_parallel_size: Count = 1
    """Stages that the layers are divided into."""
    megatron_context_parallel_size: Count = 1
    """Ranks that share each packed sequence; each takes a part of the tokens of every sample."""
    megatron_expert_parallel_size: Count = 1
    """Ranks that the experts of a mixture are divided over."""
    megatron_sequence_parallel: bool = True
    """Also divide the layers between the matrices, by tokens; needs tensor-parallel ranks."""
    megatron_use_distributed_optimizer: bool = True
    """Divide the optimizer's state over the data-parallel ranks."""
    megatron_overlap_grad_reduce: bool = False
    """Sum gradients over ranks while the backward pass goes on; where gradients are streamed, those
    of earlier passes take as much memory again."""
    megatron_gradient_checkpointing: bool = True
    """Keep only the input of each layer, and compute the layer again in the backward pass."""
    megatron_grad_reduce_in_fp32: bool = True
    """Add up gradients in float32; false = in the type of the layers, in half the memory."""
    megatron_optimizer_cpu_offload: bool = False
    """Keep optimizer state in CPU memory and step there, while copies to and from the GPU go on;
    needs a GPU, and layers in bfloat16."""
    megatron_optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the optimizer's state that is in CPU memory."""
    megatron_optimizer_dtypes: OptimizerDtypes = None
    """Types of a precision-aware optimizer, such as `{ exp_avg = "bfloat16" }`: `main_grads`
    (float32, bfloat16), `main_params` (float32, float16), and the moments `exp_avg` and
    `exp_avg_sq` (float32, float16, bfloat16, fp8); float32 where none is given. Needs Transformer
    Engine; with `megatron_optimizer_cpu_offload`, only `main_grads` may be narrower; null = the
    plain optimizer, in float32."""
    megatron_use_transformer_engine: bool = False
    """Build the layers of Transformer Engine's modules instead of Telescope's own; needs a GPU."""
    megatron_fp8: bool = False
    """Multiply matrices in 8 bits; needs Transformer Engine and a GPU that can."""


def smaller_rank(
    trainer: TrainerSection,
    megatron: MegatronSection,
    *,
    shares_gpu: bool = False,
    phase: Literal["plan", "step", "transfer"] = "plan",
) -> str:
    """Return the first unused setting that reduces the memory of a rank.

    `shares_gpu`: whether a server is on its GPU. `phase`: when it ran out of memory, or will; in a
    step "auto" may have kept too many activations, and in a transfer of weights there are none.
    """
    has_activations = phase != "transfer"
    if trainer.train_backend == "megatron":
        return _smaller_megatron_rank(megatron, has_activations=has_activations)
    if phase == "step" and trainer.gradient_checkpointing == "auto":
        return "set activation_memory_gib, or gradient_checkpointing = true"
    if has_activations and trainer.gradient_checkpointing in (False, "selective"):
        return "set gradient_checkpointing = true"
    offloads = trainer.optimizer_cpu_offload or trainer.fsdp_cpu_offload
    if not trainer.use_lora and trainer.optimizer == "adamw" and not offloads:
        return (
            "set optimizer_cpu_offload = true, optimizer = 'adamw_bf16' or 'adamw_8bit', or "
            "use_lora = true"
        )
    if not trainer.fsdp_cpu_offload:
        return "set fsdp_cpu_offload = true, which keeps the training state in CPU memory"
    other = "use a GPU for each" if shares_gpu else "raise trainer_num_workers"
    if not has_activations:
        return other
    return f"lower seq_len, or {other}" if shares_gpu else f"{other}, or lower seq_len"


def _smaller_megatron_rank(section: MegatronSection, *, has_activations: bool) -> str:
    if has_activations and not section.megatron_gradient_checkpointing:
        return "set megatron_gradient_checkpointing = true"
    if not section.megatron_use_distributed_optimizer:
        return "set megatron_use_distributed_optimizer = true"
    more = (
        "raise megatron_tensor_parallel_size or megatron_pipeline_parallel_size, and "
        f"trainer_num_workers with it{', or lower seq_len' if has_activations else ''}"
    )
    if section.megatron_optimizer_cpu_offload:
        return more
    return f"set megatron_optimizer_cpu_offload = true, or {more}"
