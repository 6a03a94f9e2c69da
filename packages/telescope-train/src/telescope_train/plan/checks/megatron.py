"""Check `[megatron]` against the other settings, the model and the device."""

from collections.abc import Iterator
from importlib.util import find_spec

from telescope_core.base.entry_points import entry_points
from telescope_train.backends.megatron.layout import (
    ModelSizes,
    config_problems,
    layout_problems,
    model_problems,
)
from telescope_train.config.fields import unused
from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import MegatronSection, TrainerSection
from telescope_train.models.device import Device, compute_dtype
from telescope_train.models.facts import ModelFacts

BACKEND = "megatron"
_NO_EFFECT = {
    "fsdp_context_parallel_size": "use megatron_context_parallel_size",
    "gradient_checkpointing": "use megatron_gradient_checkpointing, which recomputes all layers or "
    "none: this backend knows no 'auto'",
    "activation_memory_gib": "remove it",
    "optimizer_cpu_offload": "use megatron_optimizer_cpu_offload",
    "compile": "remove it",
    "fsdp_replicate_size": "remove it",
    "fsdp_cpu_offload": "remove it",
}
"""Setting of `[trainer]` that only backend fsdp uses -> what to do instead."""
_NEEDS = {
    "megatron_optimizer_offload_fraction": "megatron_optimizer_cpu_offload",
    "megatron_optimizer_dtypes": "megatron_use_distributed_optimizer",
    "megatron_optimizer_cpu_offload": "megatron_use_distributed_optimizer",
    "megatron_fp8": "megatron_use_transformer_engine",
}
"""Setting -> the setting that it needs."""
_NEEDS_GPU = (
    ("megatron_use_transformer_engine", "Transformer Engine's modules are for GPUs"),
    ("megatron_fp8", "products in 8 bits are for GPUs"),
    ("megatron_optimizer_dtypes", "that optimizer is Transformer Engine's, for GPUs"),
    ("megatron_optimizer_cpu_offload", "everything is in CPU memory already"),
)


def megatron_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem that is independent of the model and the machine."""
    yield from section_problems(config.megatron, config.trainer, config.model.model_dtype)


def section_problems(
    section: MegatronSection, trainer: TrainerSection, model_dtype: str
) -> Iterator[str]:
    """Yield the problems in those sections that supervised training also has."""
    if trainer.train_backend != BACKEND:
        if trainer.train_backend not in entry_points(group="telescope.backends").names:
            return  # refused as a name, and perhaps a typo of this one
        for name in sorted(section.model_fields_set):
            why = (
                f"with train_backend = {trainer.train_backend!r}; set train_backend = "
                f"{BACKEND!r}, or remove {name}"
            )
            yield from unused(section, f"megatron.{name}", why)
        return
    if find_spec("megatron") is None:
        yield (
            f"train_backend = {BACKEND!r} needs megatron-core, which is not installed; install "
            "telescope-train[megatron]"
        )
    yield from layout_problems(section, trainer.trainer_num_workers)
    yield from _trainer_problems(section, trainer, model_dtype)
    if section.megatron_tensor_parallel_size == 1:
        # On by default, and off says what is so.
        yield from unused(
            section,
            "megatron.megatron_sequence_parallel",
            "without tensor-parallel ranks; raise megatron_tensor_parallel_size, or remove it",
            holds=(True, False),
        )
    for name, needed in _NEEDS.items():
        if not getattr(section, needed):
            default = type(section).model_fields[name].default
            why = f"without {needed}; turn that on, or remove {name}"
            yield from unused(section, f"megatron.{name}", why, holds=(default, False))


def _trainer_problems(
    section: MegatronSection, trainer: TrainerSection, model_dtype: str
) -> Iterator[str]:
    """Yield settings of other sections that this backend does not support."""
    own = {
        "gradient_checkpointing": (
            (True, "full") if section.megatron_gradient_checkpointing else (False,)
        ),
        "optimizer_cpu_offload": (section.megatron_optimizer_cpu_offload,),
    }
    for name, advice in _NO_EFFECT.items():
        why = f"with train_backend = {BACKEND!r}; {advice}"
        yield from unused(trainer, f"trainer.{name}", why, holds=own.get(name))
    if trainer.optimizer != "adamw":
        yield (
            f"trainer.optimizer = {trainer.optimizer!r} is one of backend fsdp; use 'adamw', and "
            "megatron_optimizer_dtypes for smaller moments"
        )
    if trainer.use_lora:
        yield (
            f"trainer.use_lora does not work with train_backend = {BACKEND!r}: megatron-core has "
            "no adapters; use train_backend = 'fsdp'"
        )
    if model_dtype != "float32":
        yield (
            f"model.model_dtype = {model_dtype!r} does not work with train_backend = "
            f"{BACKEND!r}: its optimizer updates float32 weights; remove it, or use "
            "main_params of megatron_optimizer_dtypes"
        )
    # The library hands them to its optimizer on the GPU alone.
    state = {**(section.megatron_optimizer_dtypes or {}), "main_grads": "float32"}
    narrow = [name for name, dtype in state.items() if dtype != "float32"]
    if section.megatron_optimizer_cpu_offload and narrow:
        yield (
            f"megatron.megatron_optimizer_dtypes: {', '.join(narrow)} would have no effect with "
            "megatron_optimizer_cpu_offload, whose state is in float32; remove one of the two"
        )


def megatron_model_problems(
    trainer: TrainerSection, section: MegatronSection, facts: ModelFacts
) -> Iterator[str]:
    """Yield why the model cannot be trained or divided; nothing if it is not known."""
    if trainer.train_backend != BACKEND:
        return
    if facts.family is not None:
        yield from config_problems(facts.config)
    if None in (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.ffn_size):
        return
    sizes = ModelSizes(
        num_layers=facts.num_layers or 0,
        num_heads=facts.num_heads or 0,
        num_kv_heads=facts.num_kv_heads or 0,
        ffn_size=facts.ffn_size or 0,
        num_experts=facts.num_experts,
    )
    yield from model_problems(section, sizes)


def megatron_device_problems(config: TrainConfig, device: Device) -> Iterator[str]:
    """Yield the settings that this device does not support."""
    if config.trainer.train_backend == BACKEND:
        dtype = compute_dtype(config.model.mixed_precision_dtype, device)
        yield from device_problems(config.megatron, dtype, device)


def device_problems(section: MegatronSection, dtype: str, device: Device) -> Iterator[str]:
    """Yield the settings that this device does not support with layers in `dtype`."""
    if dtype != "bfloat16" and not section.megatron_grad_reduce_in_fp32:
        yield (
            "megatron.megatron_grad_reduce_in_fp32 = false has no effect where layers compute in "
            "float32, as their gradients do too; remove it, or set mixed_precision_dtype = "
            "'bfloat16'"
        )
    if device == "cuda":
        if dtype != "bfloat16" and section.megatron_optimizer_cpu_offload:
            yield (
                "megatron.megatron_optimizer_cpu_offload needs layers that compute in bfloat16, of "
                f"which it keeps wide copies, and they compute in {dtype}; set "
                "mixed_precision_dtype = 'bfloat16', or remove it"
            )
        return
    for name, reason in _NEEDS_GPU:
        if getattr(section, name):
            yield f"megatron.{name} needs a GPU, and there is none here ({reason}); remove it"
