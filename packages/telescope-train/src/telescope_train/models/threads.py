"""Number of threads of a rank without a GPU. Does not import torch."""

import os

from telescope_train.models.facts import ModelFacts

WORTH_ALL_CORES = 20_000_000
"""Parameters of a model whose products are large enough to use all cores.

A model of unknown size counts as one.
"""


def threads_of(facts: ModelFacts, *, num_ranks: int, is_alone: bool) -> int:
    """Return the number of threads of each of `num_ranks`.

    `is_alone`: they are all on this machine and nothing of the run is beside them.
    """
    size = facts.num_parameters
    if not is_alone or (size is not None and size < WORTH_ALL_CORES):
        return 1
    return max(1, usable_cores() // num_ranks)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
