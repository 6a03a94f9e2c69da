"""The weight of each trained token in one optimizer step: the only place with a denominator.

Weights are computed over all samples of the step before they are packed. Later code only sums, so
the gradient cannot depend on micro-batches, packing or the number of ranks. If gradients are taken
before the step's last sample is known, the numerators serve as weights, and the whole gradient is
divided by the denominator at the end.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import unknown_name
from telescope_train.algorithms.record import Weighting
from telescope_train.batches.batch import TrainingSample


def token_weights(
    samples: Sequence[TrainingSample], weighting: Weighting, *, max_tokens: int
) -> NDArray[np.float64]:
    """Return weights_N [N]: the weight of each trained token of sample n.

    All chains of a rollout count as one sequence. Only `constant` reads `max_tokens`.
    """
    return numerators(samples, weighting) / denominator(samples, weighting, max_tokens=max_tokens)


def numerators(samples: Sequence[TrainingSample], weighting: Weighting) -> NDArray[np.float64]:
    """Return [N] the part of each weight that depends only on the rollout of the sample.

    It is therefore known before the rest of the batch. `samples` holds all chains of its rollouts.
    """
    if _known(weighting) != "sequence":
        return np.ones(len(samples))
    rollout_N, trained_N = _rollouts(samples), _trained(samples)
    return 1.0 / np.bincount(rollout_N, weights=trained_N)[rollout_N]


def denominator(
    samples: Sequence[TrainingSample], weighting: Weighting, *, max_tokens: int
) -> float:
    """Return the denominator of all numerators of an optimizer step.

    It is 1 if there are none. Only `constant` reads `max_tokens`.
    """
    if not samples:
        return 1.0
    if _known(weighting) == "token":
        return float(_trained(samples).sum())
    num_rollouts = float(_rollouts(samples).max() + 1)
    return num_rollouts * max_tokens if weighting == "constant" else num_rollouts


def _rollouts(samples: Sequence[TrainingSample]) -> NDArray[np.int64]:
    """Return [N] the index of each sample's rollout, counted from 0."""
    rollouts: dict[tuple[str, int], int] = {}
    numbers = [rollouts.setdefault(sample.rollout_key, len(rollouts)) for sample in samples]
    return np.array(numbers, dtype=np.int64)


def _trained(samples: Sequence[TrainingSample]) -> NDArray[np.float64]:
    return np.array([np.count_nonzero(sample.mask) for sample in samples], dtype=np.float64)


def _known(weighting: Weighting) -> Weighting:
    if weighting not in get_args(Weighting):
        raise unknown_name("weighting", weighting, get_args(Weighting))
    return weighting
