"""The settings of `[megatron]`: how that backend shares the model out, and its optimizer."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from telescope_train.config.fields import Count, Section

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
    """Sum gradients over ranks while the backward pass goes on."""
    megatron_gradient_checkpointing: bool = True
    """Keep only the input of each layer, and compute the layer again in the backward pass."""
    megatron_grad_reduce_in_fp32: bool = True
    """Add up gradients in float32; false = in the type of the layers, in half the memory."""
    megatron_optimizer_cpu_offload: bool = False
    """Keep optimizer state in CPU memory and step there, while copies to and from the GPU go on;
    needs a GPU."""
    megatron_optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the optimizer's state that is in CPU memory."""
    megatron_optimizer_dtypes: OptimizerDtypes = None
    """Types of a precision-aware optimizer, such as `{ exp_avg = "bfloat16" }`: `main_grads`
    (float32, bfloat16), `main_params` (float32, float16), and the moments `exp_avg` and
    `exp_avg_sq` (float32, float16, bfloat16, fp8); float32 where none is given. Needs Transformer
    Engine; null = the plain optimizer, in float32."""
    megatron_use_transformer_engine: bool = False
    """Build the layers of Transformer Engine's modules instead of Telescope's own; needs a GPU."""
    megatron_fp8: bool = False
    """Multiply matrices in 8 bits; needs Transformer Engine and a GPU that can."""
