"""What somebody should know of a run that can start: said in its plan and when it starts."""

from collections.abc import Iterator

from telescope_train.config.fields import sorted_out, was_set
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.config import config_found
from telescope_train.plan.checks.model import rounding_notes
from telescope_train.plan.prepared import Prepared

MANY_STEPS = 20
"""Steps that are a loss if they have to be taken again."""


def notes_of(prepared: Prepared) -> tuple[str, ...]:
    """Return one line for each; empty if there is nothing to say."""
    config = prepared.config
    given = sorted_out((*config_found(config).redundant, *prepared.redundant)).note
    return (
        *(prepared.resume.notes if prepared.resume is not None else ()),
        *prepared.notes,
        *rounding_notes(
            config.model.model_dtype,
            learning_rate=config.trainer.learning_rate,
            use_lora=config.trainer.use_lora,
        ),
        *_checkpoint_notes(config),
        *_scheduling_notes(config),
        *_stop_notes(config),
        *([given] if given else []),
    )


def _stop_notes(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.stop and rollout.interleaved_rollouts and not rollout.include_stop_str_in_output:
        yield (
            "include_stop_str_in_output = false: a turn that a text of stop ended is shown without "
            "it in later prompts, not as it was sampled, so that in several turns each becomes a "
            "training sample of its own, whose history is computed again"
        )


def _checkpoint_notes(config: TrainConfig) -> Iterator[str]:
    steps = config.run.number_of_steps
    if config.checkpoint.checkpoint_every or steps <= MANY_STEPS:
        return
    yield (
        f"no checkpoint is written before the last of {steps} steps: a trainer rank that dies "
        "takes the run back to where it began, and a run that is killed cannot go on; set "
        f"--checkpoint_every {MANY_STEPS} --checkpoint_keep_last 2, or smaller numbers"
    )


def _scheduling_notes(config: TrainConfig) -> Iterator[str]:
    section = config.scheduling
    if section.batch_order == "finished":
        yield (
            "batch_order = 'finished': short answers are trained on earlier than long ones; the "
            "metric length_bias says by how much (1 = not at all)"
        )
    elif was_set(section, "max_off_policy_steps") and section.max_off_policy_steps >= 0:
        yield (
            f"max_off_policy_steps ({section.max_off_policy_steps}) is never reached: with "
            "batch_order = 'drawn' no token is further behind than max_async_rollout "
            f"({section.max_async_rollout})"
        )
