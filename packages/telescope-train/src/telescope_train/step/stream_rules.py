"""Decide whether gradients can be taken before a batch is complete. Imports no torch."""

from telescope_core.base.errors import ConfigError
from telescope_train.algorithms.record import load_algorithm
from telescope_train.config.schema import TrainConfig


def streams_gradients(config: TrainConfig) -> bool:
    """Return whether finished groups are trained on while the rest of their batch is sampled."""
    asked = config.scheduling.stream_gradients
    if asked == "auto" and config.rollout.seed_sampling:
        return False
    return asked is not False and needs_whole_batch(config) is None


def needs_whole_batch(config: TrainConfig) -> str | None:
    """Return the settings that need a whole batch before the first gradient; None = none do.

    Raises ConfigError for an unknown algorithm.
    """
    section = config.algorithm
    algorithm = load_algorithm(section.algorithm)
    if config.inference.colocate is True:
        return "colocate is true: trainer and server take turns on the GPU"
    if algorithm.compares == "batch":
        return f"{algorithm.name} compares each reward with the whole batch"
    if "advantage_norm" in algorithm.reads and section.advantage_norm != "group":
        return f'advantage_norm is "{section.advantage_norm}"'
    if section.number_of_minibatches > 1:
        return "number_of_minibatches is above 1: each minibatch is a step of its own"
    if section.ppo_epochs > 1:
        return "ppo_epochs is above 1: later epochs begin when the first has ended"
    return None


def how_gradients_are_taken(config: TrainConfig) -> str:
    """Return when the gradient of a batch is computed, and why not earlier, for people."""
    if config.scheduling.stream_gradients is False:
        return "when the batch is complete: stream_gradients is false"
    try:
        reason = needs_whole_batch(config)
    except ConfigError:
        return "unknown, as the algorithm is"
    if reason is not None:
        return f"when the batch is complete: {reason}"
    if not streams_gradients(config):
        return "when the batch is complete: seed_sampling is true, so groups are added in order"
    return "as groups end, while the rest is sampled; one optimizer step per batch"


def stream_problem(config: TrainConfig) -> str | None:
    """Return why `stream_gradients = true` cannot be met; None if it can, or is not set."""
    if config.scheduling.stream_gradients is not True:
        return None
    try:
        reason = needs_whole_batch(config)
    except ConfigError:
        return None  # reported with the algorithm
    if reason is None:
        return None
    return (
        f"scheduling.stream_gradients cannot be true, because {reason}; "
        'use "auto", or change that setting'
    )
