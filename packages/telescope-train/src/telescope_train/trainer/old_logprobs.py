"""Log-probs that stay fixed while a batch is trained on: proximal and reference ones.

The ranks compute both themselves, before the first optimizer step of the batch, and put them into
columns of the PackedBatches. So every epoch and minibatch sees the same numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.batch import PackedBatch
from telescope_train.config.schema import AlgorithmSection


class LogprobSource(Protocol):
    """The part of a trainer rank that computes log-probs."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch under the reference model."""
        ...


def with_old_logprobs(
    minibatches: Sequence[Sequence[PackedBatch]],
    rank: LogprobSource,
    algorithm: AlgorithmSection | None,
) -> list[list[PackedBatch]]:
    """Return this rank's part of each minibatch, with the columns that `algorithm` needs.

    Each column costs one forward pass over all minibatches. Every rank calls it.
    """
    shares = [list(batches) for batches in minibatches]
    if algorithm is None:
        return shares
    if algorithm.needs_proximal:
        shares = [
            [
                replace(batch, proximal_logprobs_T=logprobs_T)
                for batch, logprobs_T in zip(batches, rank.logprobs(batches), strict=True)
            ]
            for batches in shares
        ]
    if algorithm.kl_in_loss:
        shares = [
            [
                replace(batch, reference_logprobs_T=logprobs_T)
                for batch, logprobs_T in zip(batches, rank.reference_logprobs(batches), strict=True)
            ]
            for batches in shares
        ]
    return shares
