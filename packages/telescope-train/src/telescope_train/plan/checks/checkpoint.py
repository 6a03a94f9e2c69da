"""Which settings of `[checkpoint]` fit together, and which would have no effect."""

from collections.abc import Iterator

from telescope_train.config.fields import was_set
from telescope_train.config.schema import CheckpointSection


def checkpoint_problems(section: CheckpointSection, number_of_steps: int) -> Iterator[str]:
    """Yield a message for each problem in `[checkpoint]`."""
    if section.allow_changed_environments and section.resume_from_checkpoint is None:
        yield (
            "checkpoint.allow_changed_environments has no effect without resume_from_checkpoint; "
            "remove it"
        )
    if not section.checkpoint_every:
        for field in ("checkpoint_keep_last", "checkpoint_keep_every"):
            if was_set(section, field):
                yield (
                    f"checkpoint.{field} has no effect without checkpoint_every; "
                    f"set checkpoint_every, or remove {field}"
                )
        return
    if section.checkpoint_every > number_of_steps:
        yield (
            f"checkpoint.checkpoint_every ({section.checkpoint_every}) is never reached in "
            f"{number_of_steps} steps; lower it, or remove it (the last step is "
            "always saved)"
        )
    every = section.checkpoint_keep_every
    if every is None:
        return
    if section.checkpoint_keep_last is None:
        yield (
            "checkpoint.checkpoint_keep_every has no effect without checkpoint_keep_last, because "
            "all checkpoints are kept; set checkpoint_keep_last, or remove checkpoint_keep_every"
        )
    elif every % section.checkpoint_every:
        yield (
            f"checkpoint.checkpoint_keep_every ({every}) must be a multiple of checkpoint_every "
            f"({section.checkpoint_every}), because only those steps have a checkpoint; change one"
        )
