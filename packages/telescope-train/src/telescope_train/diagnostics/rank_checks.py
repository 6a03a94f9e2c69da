"""Checks of a trainer rank at its start, so that no wrong number is trained on silently.

Packing samples must not change their log-probs. It would, if attention ignored the boundaries of
samples, or if the output head did more than a matrix product. A forward pass with a gradient must
give the same numbers as one without, and a step at learning rate 0 must not move any weight. Checks
that need an inference engine are in `engine_check`.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import ConfigError
from telescope_train.backends.protocol import TrainerBackend
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import pack

LENGTHS = (23, 9)
"""Tokens of the samples that are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """One measurement that was made before training."""

    name: str
    value: float
    """The measured value, in `unit`."""
    limit: float
    """Largest value that passes, in `unit`."""
    unit: str
    remedy: str
    """What is wrong if the value is larger, and what to do."""
    note: str = ""
    """Anything else that a reader should know."""

    @property
    def is_passed(self) -> bool:
        """Whether the value is within the limit; NaN and infinity never are."""
        return self.value <= self.limit

    @property
    def text(self) -> str:
        """Name and value in a form for people."""
        return f"{self.name} ({self.value:.2g} {self.unit})"

    def require(self) -> "SelfTest":
        """Return this test; raises ConfigError if it has not passed."""
        if not self.is_passed:
            raise ConfigError(
                f"self-test {self.name!r}: expected at most {self.limit:g} {self.unit}, got "
                f"{self.value:.3g}: {self.remedy}"
            )
        return self


def check_rank(
    backend: TrainerBackend, *, vocab_size: int, tolerance: float, exactness: float | None
) -> list[SelfTest]:
    """Run every check of a rank; returns what was measured, or raises ConfigError at a failure.

    `tolerance`: largest difference, nats, between two ways to compute the same number. `exactness`:
    largest difference of importance weights from 1; None if dropout makes every forward pass with
    a gradient different. Every rank calls this, and before the backend has taken a step.
    """
    difference = check_packing(backend, vocab_size=vocab_size, tolerance=tolerance)
    batch = _batch([_sample(np.random.default_rng(0), length, vocab_size) for length in LENGTHS])
    (logprobs_T,) = backend.logprobs([batch])
    batch = replace(
        batch,
        behavior_logprobs_T=logprobs_T,
        proximal_logprobs_T=logprobs_T,
        reference_logprobs_T=logprobs_T,
        advantages_T=np.where(batch.mask_T, 1.0, 0.0).astype(np.float32),
    )
    attention = backend.attention
    tests = [
        SelfTest(
            name=f"attention {attention.kind.name} keeps samples apart",
            value=attention.difference,
            limit=attention.tolerance,
            unit="relative difference",
            remedy="the next kind of attention is tried",
            note=attention.reasons,
        ),
        SelfTest(
            name="packing does not leak",
            value=difference,
            limit=tolerance,
            unit="nats",
            remedy="train another model",
        ),
    ]
    weight = backend.accumulate_gradient([batch], version=0).metrics["importance_weight"]
    if exactness is not None:
        tests.append(
            SelfTest(
                name="importance weight is 1",
                value=max(abs(weight.lowest - 1.0), abs(weight.highest - 1.0)),
                limit=exactness,
                unit="away from 1 before any step",
                remedy="a forward pass with a gradient differs from one without; turn off compile "
                "and gradient_checkpointing, and report the model to the developers",
            ).require()
        )
    tests.append(
        SelfTest(
            name="learning rate 0 does not drift",
            value=float(backend.rehearse_step()),
            limit=0.0,
            unit="weight tensors changed",
            remedy="the optimizer moves weights on its own; use optimizer = 'adamw' and report "
            "this to the developers",
        ).require()
    )
    return tests


def check_packing(backend: TrainerBackend, *, vocab_size: int, tolerance: float) -> float:
    """Compare packed samples with single ones; returns the largest log-prob difference, nats.

    Raises ConfigError if it exceeds `tolerance`, nats. Every rank calls this.
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
            "output head works in a way that this backend does not support; train another model"
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
