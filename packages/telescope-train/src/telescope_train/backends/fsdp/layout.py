"""The division of a run among the ranks of backend `fsdp`. Imports no torch.

Whole copies of the model (`fsdp_replicate_size`) are blocks of consecutive ranks, which `cluster`
puts on one node where it can. Within a block every weight is sharded over all ranks, including the
ranks that share rows (`fsdp_context_parallel_size`).
"""

from telescope_core.base.errors import ConfigError
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.trainer_section import TrainerSection


def fsdp_layout(trainer: TrainerSection, num_ranks: int) -> RankLayout:
    """Return the layout of `num_ranks` ranks; ConfigError if the settings do not divide them."""
    context, copies = trainer.fsdp_context_parallel_size, trainer.fsdp_replicate_size
    if num_ranks % context:
        raise ConfigError(
            f"trainer.trainer_num_workers ({num_ranks}) must be a multiple of "
            f"fsdp_context_parallel_size ({context}), because that many ranks share a sequence; "
            "change one"
        )
    if num_ranks % (context * copies):
        raise ConfigError(
            f"trainer.fsdp_replicate_size ({copies}) must divide the {num_ranks // context} groups "
            "of ranks with rows of their own (trainer_num_workers over "
            "fsdp_context_parallel_size), because each copy of the model is kept by whole groups; "
            "change one"
        )
    return RankLayout(data=num_ranks // context, context=context, weight_shards=num_ranks // copies)
