"""The settings of `[megatron]`: how that backend shares the model out, and its optimizer."""

from typing import Annotated, Literal

from pydantic import Field

from telescope_train.config.fields import Count, Section


class MegatronSection(Section):
    """How `train_backend = "megatron"` shares the model over the ranks, and its optimizer.

    Data-parallel ranks are what is left: `trainer_num_workers` over the product of the tensor,
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
    """Also divide what is between the matrices, by tokens; needs tensor-parallel ranks."""
    megatron_use_distributed_optimizer: bool = True
    """Divide the optimizer's state over the data-parallel ranks."""
    megatron_overlap_grad_reduce: bool = False
    """Sum gradients over ranks while the backward pass goes on."""
    megatron_gradient_checkpointing: bool = True
    """Keep only the input of each layer, and compute the layer again in the backward pass."""
    megatron_grad_reduce_in_fp32: bool = True
    """Add up gradients in float32; false = in the type of the layers, in half the memory."""
    megatron_optimizer_cpu_offload: bool = False
    """Keep optimizer state in CPU memory and step there; needs a GPU."""
    megatron_optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the optimizer's state that is in CPU memory."""
    megatron_overlap_cpu_optimizer_d2h_h2d: bool = True
    """Copy to and from the CPU while the optimizer steps."""
    megatron_use_precision_aware_optimizer: bool = False
    """Keep the optimizer's numbers in the four types below; needs Transformer Engine."""
    megatron_main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients that the optimizer reads."""
    megatron_main_params_dtype: Literal["float32", "float16"] = "float32"
    """Type of the weights that the optimizer updates."""
    megatron_exp_avg_dtype: Literal["float32", "float16", "bfloat16", "fp8"] = "float32"
    """Type of Adam's first moment."""
    megatron_exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16", "fp8"] = "float32"
    """Type of Adam's second moment."""
    megatron_use_transformer_engine: bool = False
    """Build the layers of Transformer Engine's modules instead of Telescope's own; needs a GPU."""
    megatron_fp8: bool = False
    """Multiply matrices in 8 bits; needs Transformer Engine and a GPU that can."""
