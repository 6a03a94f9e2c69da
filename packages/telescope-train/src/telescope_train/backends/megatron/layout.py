"""Which rank holds which part: tensor, pipeline, context, expert and data-parallel ranks.

Plain arithmetic without torch or megatron-core, for plans as well. The order is the library's own,
from the inside out: tensor, context, expert, data, pipeline. Experts are divided over ranks that
differ in tensor, context or data place, and are themselves never divided.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from telescope_train.config.megatron_section import MegatronSection


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """How a number of ranks share one model and its rows."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    num_ranks: int

    @classmethod
    def of(cls, section: MegatronSection, num_ranks: int) -> "MegatronLayout":
        """Return the layout that the settings ask for; see `layout_problems`."""
        return cls(
            tensor=section.megatron_tensor_parallel_size,
            pipeline=section.megatron_pipeline_parallel_size,
            context=section.megatron_context_parallel_size,
            expert=section.megatron_expert_parallel_size,
            num_ranks=num_ranks,
        )

    @property
    def data(self) -> int:
        """Ranks that each take rows of their own: the shards of a step."""
        return self.num_ranks // (self.tensor * self.context * self.pipeline)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one pipeline stage together."""
        return self.num_ranks // self.pipeline

    @property
    def speakers(self) -> tuple[int, ...]:
        """The rank that answers for each shard: its first one with the last layers."""
        first = (self.pipeline - 1) * self.ranks_per_stage
        return tuple(first + data * self.tensor * self.context for data in range(self.data))

    def shard_of(self, rank: int) -> int:
        """Return the shard of a step that `rank` takes."""
        return rank % self.ranks_per_stage // (self.tensor * self.context)


def layout_problems(section: MegatronSection, num_ranks: int) -> Iterator[str]:
    """Yield why `num_ranks` ranks cannot be laid out as the settings ask."""
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


def model_problems(section: MegatronSection, sizes: "ModelSizes") -> Iterator[str]:
    """Yield why the model of these sizes cannot be divided as the settings ask."""
    tensor = section.megatron_tensor_parallel_size
    pipeline = section.megatron_pipeline_parallel_size
    context = section.megatron_context_parallel_size
    expert = section.megatron_expert_parallel_size
    for what, count in (
        ("attention heads", sizes.num_heads),
        ("key-value heads", sizes.num_kv_heads),
        ("columns of the feed-forward layers", sizes.ffn_size),
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
            f"megatron.megatron_context_parallel_size ({context}) must divide the {heads} attention "
            f"heads of a rank, and fit its {kv_heads} key-value heads; lower it"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a division has to fit."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    """Columns between the two products of a dense feed-forward layer; experts are not divided."""
    num_experts: int | None
    """None = a dense model."""
