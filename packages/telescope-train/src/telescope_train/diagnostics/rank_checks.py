"""Checks of a trainer rank at its start, which prevent training on wrong numbers.

The output head must compute the same from hidden states as in transformers, including a soft cap or
a scale. Packing must not change the log-probs of samples, as it would if attention ignored their
boundaries, and neither must sharing their common prefixes. A forward pass with a gradient must give
the same numbers as one without, and a step at learning rate 0 must not move any weight. A reference
model is the policy before its first step. Checks that need an inference engine are in
`engine_check`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError
from telescope_train.backends.trainer_backend import TrainerBackend
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import end_to_end, pack
from telescope_train.models.attention.choice import SHARED
from telescope_train.models.head_check import HEAD_LIMIT

Logprobs: TypeAlias = NDArray[np.float32]
LogprobsOf: TypeAlias = Callable[[Sequence[PackedBatch]], list[Logprobs]]
SPREADS = 4.0
"""Factor by which packed samples may differ more from transformers' log-probs than single ones
do."""
LENGTH_SPREADS = 2.0
"""Factor by which packed samples may differ more than transformers' own longer rows do."""
LENGTHS = (23, 9)
"""Numbers of tokens of the samples for the checks."""


class Tolerance(NamedTuple):
    """Largest difference of log-probs from transformers'; the larger of both limits counts."""

    nats: float
    share_of_leak: float
    """Share of the effect that another sample before it has on a sample's log-probs."""

    @classmethod
    def from_dtype(cls, dtype: str) -> "Tolerance":
        """Return the tolerance for layers that compute in `dtype`."""
        return cls(0.02, 0.1) if dtype in ("bfloat16", "float16") else cls(1e-3, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """One measurement before training."""

    name: str
    value: float
    """The measured value, in `unit`."""
    limit: float
    """Largest value that passes, in `unit`."""
    unit: str
    remedy: str
    """Meaning of a larger value, and what to do."""
    note: str = ""
    """Further remark for readers."""

    @property
    def is_passed(self) -> bool:
        """Whether the value is within the limit; NaN and infinity are not."""
        return self.value <= self.limit

    @property
    def text(self) -> str:
        """Name and value, formatted for people."""
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
    backend: TrainerBackend,
    *,
    vocab_size: int,
    tolerance: Tolerance,
    exactness: float | None,
    reference_exactness: float | None = None,
    has_other_reference: bool = False,
    shares_prefixes: bool = False,
) -> list[SelfTest]:
    """Run every check of a rank; returns the measurements, or raises ConfigError at a failure.

    `exactness`: largest difference of importance weights from 1; None if dropout makes every
    forward pass with a gradient different. Every rank calls this, and before the backend has taken
    a step. `reference_exactness`: largest difference of the reference model's log-probs, nats; None
    without a reference, or with another model, which `has_other_reference` says. `shares_prefixes`:
    samples that begin alike are tested, too.
    """
    head = check_head(backend).require()  # first, because what it finds has one cause
    packing = check_packing(backend, vocab_size=vocab_size, tolerance=tolerance)
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
        head,
        SelfTest(
            name=f"attention {attention.kind.name} keeps samples apart",
            value=attention.difference,
            limit=attention.tolerance,
            unit="relative difference",
            remedy="the next kind of attention is tried",
            note=attention.reasons,
        ),
        packing,
    ]
    if shares_prefixes:
        tests.append(check_sharing(backend, vocab_size=vocab_size, tolerance=tolerance).require())
    weight = backend.accumulate_gradient([batch], version=0).metrics["importance_weight"]
    if exactness is not None:
        # Where passes need not be equal, what float32 rounds of the largest log-prob is no fault.
        rounding = np.finfo(np.float32).eps * float(np.abs(logprobs_T).max())
        tests.append(
            SelfTest(
                name="importance weight is 1",
                value=max(abs(weight.lowest - 1.0), abs(weight.highest - 1.0)),
                limit=max(exactness, rounding) if exactness else 0.0,
                unit="away from 1 before any step",
                remedy="a forward pass with a gradient differs from one without; turn off compile "
                "and gradient_checkpointing, and report the model to the developers",
            ).require()
        )
    if reference_exactness is not None:
        (reference_T,) = backend.reference_logprobs([batch])
        tests.append(
            SelfTest(
                name="reference is the policy at its start",
                value=float(np.abs(reference_T - logprobs_T)[batch.mask_T].max()),
                limit=reference_exactness,
                unit="nats",
                remedy="a penalty would keep the policy close to another model than its own start; "
                "report the model to the developers, and train it without a reference",
            ).require()
        )
    if has_other_reference:
        tests += check_other_reference(
            backend, vocab_size=vocab_size, tolerance=tolerance, shares_prefixes=shares_prefixes
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


def check_other_reference(
    backend: TrainerBackend, *, vocab_size: int, tolerance: Tolerance, shares_prefixes: bool
) -> list[SelfTest]:
    """Compare the log-probs of `reference_model` with those of transformers, as the policy's are.

    Every rank calls this.
    """
    model = _Computes(
        logprobs=backend.reference_logprobs,
        transformers_logprobs=partial(backend.reference_logprobs, by_transformers=True),
    )
    try:
        tests = [check_packing(model, vocab_size=vocab_size, tolerance=tolerance)]
        if shares_prefixes:
            shared = check_sharing(model, vocab_size=vocab_size, tolerance=tolerance)
            tests.append(shared.require())
    except ConfigError as error:
        raise ConfigError(f"reference_model: {error}") from error
    return [replace(one, name=f"{one.name} in the reference model") for one in tests]


def check_head(backend: TrainerBackend) -> SelfTest:
    """Compare the output head with transformers' own, in float32 whatever the layers compute in.

    Every rank calls this.
    """
    return SelfTest(
        name="output head is that of transformers",
        value=backend.head_difference(),
        limit=HEAD_LIMIT,
        unit="nats",
        remedy="between its last hidden states and its logits the model does something that this "
        "version does not know; train another model, and report this one to the developers",
    )


class _HasLogprobs(Protocol):
    """A model that computes log-probs of batches, in this package and in transformers."""

    @property
    def logprobs(self) -> LogprobsOf: ...
    @property
    def transformers_logprobs(self) -> LogprobsOf: ...


class _Computes(NamedTuple):
    logprobs: LogprobsOf
    transformers_logprobs: LogprobsOf


def check_packing(model: _HasLogprobs, *, vocab_size: int, tolerance: Tolerance) -> SelfTest:
    """Compare packed samples with single ones computed by transformers.

    Differences from rounding grow with depth and with the size of logits, so they are measured; see
    `_rounding`. The single samples are also compared with transformers, and their limit is a share
    of a real leak: the second sample computed with the first one as its beginning. Raises
    ConfigError if a difference is too large. Every rank calls this.
    """
    generator = np.random.default_rng(0)
    first, second = (_sample(generator, length, vocab_size) for length in LENGTHS)
    together = np.concatenate(_logprobs_of([first, second], model.logprobs))
    alone = _each_alone([first, second], model.logprobs)
    expected = _each_alone([first, second], model.transformers_logprobs)
    joined = replace(
        first,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        mask=np.arange(sum(LENGTHS)) > 0,
        behavior_logprobs=np.zeros(sum(LENGTHS), np.float32),
    )
    (leaked,) = _logprobs_of([joined], model.transformers_logprobs)
    num_second = LENGTHS[1] - 1
    leak = _rms(leaked[-num_second:] - expected[-num_second:])
    spread = _rms(alone - expected)
    _require(spread, max(tolerance.nats, tolerance.share_of_leak * leak), "single")
    rounding = _rounding([first, second], alone, expected, model.transformers_logprobs)
    limit = max(tolerance.nats, rounding)
    found = _rms(together - expected)
    _require(found, limit, "packed")
    return SelfTest(
        name="packing does not leak",
        value=found,
        limit=limit,
        unit="nats",
        remedy="train another model",
    )


def _require(found: float, limit: float, samples: str) -> None:
    # Written with "not" so that NaN is refused as well.
    if not found <= limit:
        raise ConfigError(
            f"the model's log-probs of {samples} samples differ by {found:.3g} nats from those of "
            f"single ones in transformers, where rounding explains {limit:.3g}: its attention "
            "works in a way that this backend does not support; train another model"
        )


def check_sharing(model: _HasLogprobs, *, vocab_size: int, tolerance: Tolerance) -> SelfTest:
    """Compare samples that share prefixes with single ones computed by transformers.

    The samples branch twice. The limit is that of `check_packing`. Every rank calls this.
    """
    generator = np.random.default_rng(1)
    samples = [_sample(generator, SHARED.lengths_S[0], vocab_size)]
    for length, common in zip(SHARED.lengths_S[1:], SHARED.shared_S[1:], strict=True):
        other = _sample(generator, length, vocab_size)
        begun = np.concatenate([samples[-1].token_ids[:common], other.token_ids[common:]])
        samples.append(replace(other, token_ids=begun))
    batch = replace(end_to_end(samples, np.ones(len(samples))), shared_S=SHARED.shared_S)
    (found_T,) = model.logprobs([batch])
    alone = _each_alone(samples, model.logprobs)
    expected = _each_alone(samples, model.transformers_logprobs)
    return SelfTest(
        name="shared prefixes change nothing",
        value=_rms(found_T[batch.mask_T] - expected),
        limit=max(tolerance.nats, _rounding(samples, alone, expected, model.transformers_logprobs)),
        unit="nats",
        remedy="set share_prefixes = false, and report the model to the developers",
    )


def _rounding(
    samples: list[TrainingSample], alone: Logprobs, expected: Logprobs, logprobs: LogprobsOf
) -> float:
    """Return the difference, in nats, due to rounding for samples with `expected` log-probs.

    A backend rounds in another order, as it does for samples that are `alone`. And in rows of other
    lengths libraries take other kernels, which round differently as well: what follows a token does
    not change its log-prob, so transformers' own in longer rows show how much that is.
    """
    longer = np.concatenate(
        [_logprobs_of([_continued(one)], logprobs)[0][: len(one) - 1] for one in samples]
    )
    return max(SPREADS * _rms(alone - expected), LENGTH_SPREADS * _rms(longer - expected))


def _continued(sample: TrainingSample) -> TrainingSample:
    """Return `sample` repeated until it is as long as a row of packed samples."""
    length = sum(LENGTHS)
    mask = np.arange(length) > 0
    return replace(
        sample,
        token_ids=np.resize(sample.token_ids, length),
        mask=mask,
        behavior_logprobs=np.where(mask, 0.0, np.nan).astype(np.float32),
    )


def _each_alone(samples: list[TrainingSample], logprobs: LogprobsOf) -> Logprobs:
    """Return the log-probs of all samples, each computed in its own row."""
    return np.concatenate([_logprobs_of([one], logprobs)[0] for one in samples])


def _logprobs_of(samples: list[TrainingSample], logprobs: LogprobsOf) -> list[Logprobs]:
    """Return the log-probs of the trained tokens of each sample; they share one row."""
    batch = _batch(samples)
    (found_T,) = logprobs([batch])
    by_length = {
        int((batch.sequence_ids_T == number).sum()): found_T[
            (batch.sequence_ids_T == number) & batch.mask_T
        ]
        for number in range(len(samples))
    }
    return [by_length[len(sample)] for sample in samples]


def _rms(values: Logprobs) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


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
