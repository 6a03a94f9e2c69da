"""Log-probs that must not move while a batch is learned from: proximal and reference ones.

Both are taken by the ranks themselves, before the first optimizer step of the batch, and put into
the columns of the PackedBatches; every epoch and minibatch then sees the same numbers.
"""

from collections.abc import Sequence
from dataclasses import replace

from telescope_train.backends.protocol import TrainerBackend
from telescope_train.batches.batch import PackedBatch
from telescope_train.config.schema import AlgorithmSection


def with_old_logprobs(
    minibatches: Sequence[Sequence[PackedBatch]],
    backend: TrainerBackend,
    algorithm: AlgorithmSection | None,
) -> list[list[PackedBatch]]:
    """Return this rank's share of each minibatch with the columns that `algorithm` needs.

    Costs one forward pass over everything for each column. Every rank calls it.
    """
    shares = [list(batches) for batches in minibatches]
    if algorithm is None:
        return shares
    if algorithm.needs_proximal:
        shares = [
            [
                replace(batch, proximal_logprobs_T=logprobs_T)
                for batch, logprobs_T in zip(batches, backend.logprobs(batches), strict=True)
            ]
            for batches in shares
        ]
    if algorithm.kl_in_loss:
        shares = [
            [
                replace(batch, reference_logprobs_T=logprobs_T)
                for batch, logprobs_T in zip(
                    batches, backend.reference_logprobs(batches), strict=True
                )
            ]
            for batches in shares
        ]
    return shares
