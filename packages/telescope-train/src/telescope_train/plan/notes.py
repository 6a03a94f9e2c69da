"""Notes about a run that can start, for its plan and its start."""

from collections.abc import Iterator

from telescope_core.reports.before_after import trained_evals
from telescope_train.algorithms import load_algorithm
from telescope_train.config.fields import sorted_out, was_set
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.config import config_found
from telescope_train.plan.checks.model import rounding_notes
from telescope_train.plan.prepared import Prepared

MANY_STEPS = 20
"""Number of steps that would be a serious loss."""


def notes_of(prepared: Prepared) -> tuple[str, ...]:
    """Return the notes, one line each; empty if there are none."""
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
        *_split_notes(prepared),
        *_checkpoint_notes(config),
        *_opponent_notes(config),
        *_scheduling_notes(config),
        *_stop_notes(config),
        *_algorithm_notes(config),
        *([given] if given else []),
    )


def _split_notes(prepared: Prepared) -> Iterator[str]:
    config = prepared.config
    names = [one.name for one in config.environments if one.split == "eval"]
    records = prepared.environments.records
    trained = trained_evals(config.model_dump(mode="json"), records)
    others = [name for name in trained if name not in names]
    if names:
        yield (
            f'split = "eval": the run trains on the examples that evals play of '
            f"{', '.join(names)}. No result on that split is held out for its weights: it shows "
            "whether training works, not what the model has learned beyond these examples"
        )
    if others:
        yield (
            f"evals of {', '.join(others)} play the split that is trained on, so that what they "
            "show is not held out"
        )


def _stop_notes(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.stop and rollout.interleaved_rollouts and not rollout.include_stop_str_in_output:
        yield (
            "include_stop_str_in_output = false: a turn that a text of stop ended is shown without "
            "it in later prompts, not as it was sampled, so that in several turns each becomes a "
            "training sample of its own, whose history is computed again"
        )


def _algorithm_notes(config: TrainConfig) -> Iterator[str]:
    section = config.algorithm
    algorithm = load_algorithm(section.algorithm)
    is_divided = "advantage_norm" in algorithm.reads and section.advantage_norm == "group"
    if section.kl_in_reward and is_divided:
        yield (
            f"kl_in_reward with {algorithm.name}, which divides by the deviation of a group: if "
            "its rewards are equal, that of the KL divergence is all there is, and it is learned "
            "as strongly as any reward, whatever kl_penalty_tau is; set advantage_norm = 'batch', "
            "kl_in_reward = false, or an algorithm that does not divide, such as rloo"
        )
    ranged = [entry.name for entry in config.environments if entry.reward_min is not None]
    if section.advantage_norm == "parts" and ranged:
        yield (
            f"reward_min and reward_max of {', '.join(ranged)} clip and scale only rewards that "
            'are compared as a whole: with advantage_norm = "parts", parts are compared as they are'
        )
    if section.use_tis and section.tis_mode == "icepop" and not section.tis_floor:
        yield (
            "tis_mode = 'icepop' with tis_floor = 0 leaves out only tokens that became more "
            "likely; IcePop bounds the weight on both sides: set tis_floor, for instance to 0.5"
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


def _opponent_notes(config: TrainConfig) -> Iterator[str]:
    every, section = config.inference.opponent_update_every, config.checkpoint
    if not config.inference.opponent_num_servers:
        return
    is_saved = section.checkpoint_every and not every % section.checkpoint_every
    is_kept = section.checkpoint_keep_last is None or section.checkpoint_keep_every == every
    if not is_saved or not is_kept:
        keeping = "" if is_kept else f" and --checkpoint_keep_every {every}"
        yield (
            "older versions that no checkpoint holds are gone when the run is resumed, and the "
            "weights that it goes on with take their places: to keep them, set --checkpoint_every "
            f"to a divisor of opponent_update_every ({every}){keeping}"
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
