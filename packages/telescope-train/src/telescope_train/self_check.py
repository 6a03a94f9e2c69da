"""What a trainer rank proves at its start: packing samples does not change their log-probs.

A model whose attention ignores the sample boundaries, or whose head does more than a product
(soft caps, scales), would otherwise train on wrong numbers in silence.
"""

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import ConfigError
from telescope_train.backends.protocol import TrainerBackend
from telescope_train.batch import PackedBatch, TrainingSample
from telescope_train.packing import pack

LENGTHS = (23, 9)


def check_packing(backend: TrainerBackend, *, vocab_size: int, tolerance: float) -> float:
    """Compare a packed forward with one-by-one forwards; returns the largest difference, nats.

    Raises ConfigError when it exceeds `tolerance`. Every rank calls it.
    """
    generator = np.random.default_rng(0)
    samples = [_sample(generator, length, vocab_size) for length in LENGTHS]
    together = np.sort(_trained(_batch(samples), backend.logprobs))
    alone = [_trained(_batch([sample]), backend.transformers_logprobs) for sample in samples]
    difference = float(np.abs(together - np.sort(np.concatenate(alone))).max())
    if not difference <= tolerance:
        raise ConfigError(
            f"the model's log-probs of packed samples differ from those of single ones by "
            f"{difference:.3g} nats (at most {tolerance:g} is expected): its attention or its "
            "output head works in a way this backend does not know; train another model"
        )
    return difference


def _sample(generator: np.random.Generator, length: int, vocab_size: int) -> TrainingSample:
    mask = np.arange(length) > 0
    return TrainingSample(
        token_ids=generator.integers(vocab_size, size=length, dtype=np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, 0.0, np.nan).astype(np.float32),
        advantage=0.0,
        temperature=0.7,
        oldest_version=0,
        newest_version=0,
        group_id="self-check",
        rollout_index=length,
        environment="self-check",
    )


def _batch(samples: list[TrainingSample]) -> PackedBatch:
    packed = pack(samples, np.ones(len(samples)), seq_len=sum(LENGTHS), num_ranks=1)
    return packed[0][0]


def _trained(batch: PackedBatch, logprobs: object) -> NDArray[np.float32]:
    return logprobs([batch])[0][batch.mask_T]
