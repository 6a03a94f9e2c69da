"""The division of a run among the ranks of backend `megatron`. Imports no torch.

The order of ranks is the library's own, `RankLayout`'s. Experts are divided over the ranks of a
pipeline stage, and are themselves never divided.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from telescope_core.base.errors import ConfigError
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.trainer_section import MegatronSection

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` for which the conversion of weights works."""
ROTATIONS = "rope_type {kind!r}, whose rotations depend on the sequence's length or are scaled"
"""Why a model with such rotations cannot be trained."""


def megatron_layout(section: MegatronSection, num_ranks: int) -> RankLayout:
    """Return the layout of `num_ranks` ranks; ConfigError if the settings do not divide them."""
    problems = list(layout_problems(section, num_ranks))
    if problems:
        raise ConfigError("\n".join(problems))
    tensor = section.megatron_tensor_parallel_size
    pipeline = section.megatron_pipeline_parallel_size
    context = section.megatron_context_parallel_size
    return RankLayout(
        data=num_ranks // (tensor * pipeline * context),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=section.megatron_expert_parallel_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that a division over ranks must fit."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    """Width of a dense feed-forward layer."""
    num_experts: int | None
    """None = a dense model."""


def why_not_shared(section: MegatronSection) -> str | None:
    """Return why samples of a row cannot share their first tokens; None = they can."""
    if section.megatron_context_parallel_size > 1:
        return "context-parallel ranks of Megatron each hold pieces of every sample"
    if section.megatron_use_transformer_engine:
        return "Transformer Engine's attention knows samples one by one"
    return None


def layout_problems(section: MegatronSection, num_ranks: int) -> Iterator[str]:
    """Yield the reasons why `num_ranks` ranks cannot be laid out as the settings say."""
    tensor = section.megatron_tensor_parallel_size
    pipeline = section.megatron_pipeline_parallel_size
    context = section.megatron_context_parallel_size
    expert = section.megatron_expert_parallel_size
    together = tensor * pipeline * context
    if num_ranks % together:
        yield (
            f"trainer.trainer_num_workers ({num_ranks}) must be a multiple of {together}: "
            f"megatron_tensor_parallel_size ({tensor}) x megatron_pipeline_parallel_size "
            f"({pipeline}) x megatron_context_parallel_size ({context}); change one of them"
        )
    elif (num_ranks // pipeline) % expert:
        yield (
            f"megatron.megatron_expert_parallel_size ({expert}) must divide the "
            f"{num_ranks // pipeline} ranks of a pipeline stage; change it, or "
            "trainer_num_workers"
        )


def config_problems(config: Mapping[str, object]) -> Iterator[str]:
    """Yield why a model with these fields in its `config.json` cannot be trained."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield (
            f"train_backend 'megatron' converts the weights of {', '.join(FAMILIES)}, got a model "
            f"of type {family!r}; use train_backend = 'fsdp'"
        )
    elif reasons := list(_reasons(config)):
        yield (
            f"train_backend 'megatron' cannot train this {family} model: {'; '.join(reasons)}; "
            "use train_backend = 'fsdp', or another model"
        )


def _reasons(config: Mapping[str, object]) -> Iterator[str]:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act = {activation!r} (only silu)"
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            yield f"{name} = true"
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    is_windowed = "sliding_attention" in cast(list[str], kinds or ())
    if is_windowed or (window and not kinds and config["model_type"] in ("mistral", "mixtral")):
        yield f"a sliding window of {window} tokens"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield "dense layers between those with experts"
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = cast(Mapping[str, object], found)
    kind = rope.get("rope_type", rope.get("type"))
    is_scaled = kind == "yarn" and not rope.keys() & {"attention_factor", "mscale"}
    if kind in ("dynamic", "longrope") or is_scaled:
        yield ROTATIONS.format(kind=kind)


def model_problems(section: MegatronSection, sizes: ModelSizes) -> Iterator[str]:
    """Yield the reasons why a model of these sizes cannot be divided as the settings say."""
    tensor = section.megatron_tensor_parallel_size
    pipeline = section.megatron_pipeline_parallel_size
    context = section.megatron_context_parallel_size
    expert = section.megatron_expert_parallel_size
    for what, count in (
        ("attention heads", sizes.num_heads),
        ("key-value heads", sizes.num_kv_heads),
        # Experts are whole on their rank: a mixture has no columns to divide.
        ("columns of the feed-forward layers", 0 if sizes.num_experts else sizes.ffn_size),
    ):
        if count % tensor:
            yield (
                f"megatron.megatron_tensor_parallel_size ({tensor}) must divide the model's "
                f"{count} {what}; lower it"
            )
    if sizes.num_layers % pipeline:
        yield (
            f"megatron.megatron_pipeline_parallel_size ({pipeline}) must divide the model's "
            f"{sizes.num_layers} layers; change it"
        )
    heads = sizes.num_heads // tensor
    kv_heads = max(1, sizes.num_kv_heads // tensor)
    if heads % context or (kv_heads % context and context % kv_heads):
        yield (
            f"megatron.megatron_context_parallel_size ({context}) must divide the {heads} "
            f"attention heads of a rank, and fit its {kv_heads} key-value heads; lower it"
        )
    if sizes.num_experts is None:
        if expert > 1:
            yield (
                f"megatron.megatron_expert_parallel_size ({expert}) has no effect: the model has "
                "no experts; remove it"
            )
        return
    if sizes.num_experts % expert:
        yield (
            f"megatron.megatron_expert_parallel_size ({expert}) must divide the model's "
            f"{sizes.num_experts} experts; change it"
        )
    if tensor > 1 and not section.megatron_sequence_parallel:
        yield (
            "megatron.megatron_sequence_parallel = false does not work for a mixture of experts "
            f"with megatron_tensor_parallel_size ({tensor}): ranks would route the same tokens; "
            "turn it on"
        )
