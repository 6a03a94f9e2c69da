"""The weight of each trained token in one optimizer step: the only place with a denominator.

Weights are computed over all samples of the step before they are packed. Everything later only
sums, so the gradient cannot depend on micro-batches, packing or the number of ranks.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import unknown_name
from telescope_train.algorithms.record import Weighting
from telescope_train.batches.batch import TrainingSample


def token_weights(
    samples: Sequence[TrainingSample], weighting: Weighting, *, max_tokens: int
) -> NDArray[np.float64]:
    """Return weights_N [N]: the weight of each trained token of sample n.

    All chains of a rollout count as one sequence. Only `constant` reads `max_tokens`.
    """
    if weighting not in get_args(Weighting):
        raise unknown_name("weighting", weighting, get_args(Weighting))
    if not samples:
        return np.zeros(0)
    rollouts: dict[tuple[str, int], int] = {}
    rollout_N = np.array([rollouts.setdefault(s.rollout_key, len(rollouts)) for s in samples])
    trained_N = np.array([np.count_nonzero(s.mask) for s in samples], dtype=np.float64)
    if weighting == "token":
        return np.full(len(samples), 1.0 / trained_N.sum())
    if weighting == "constant":
        return np.full(len(samples), 1.0 / (len(rollouts) * max_tokens))
    length_N = np.bincount(rollout_N, weights=trained_N)[rollout_N]
    return 1.0 / (len(rollouts) * length_N)
