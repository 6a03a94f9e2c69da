"""One optimizer step whose gradient is taken while its batch is still being sampled.

    sampler.finished(b)   lists of groups, as they end
         | groups
    GradientStream.add    credit of these groups; whole rounds of packed batches go to the ranks
         | the rest waits for the groups that follow
    .rest                 what is left when the batch is complete
    .apply                the gradient is divided by the denominator of the whole batch

The gradient is a sum over tokens, and only its denominator needs the whole batch. So this is the
step that `plan_step` would have taken, up to the order in which floats are added.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Group, WeightVersion
from telescope_train.backends.protocol import Ranks
from telescope_train.batches.batch import PackedBatch, StepPlan, TrainingSample
from telescope_train.batches.binning import spread_over_ranks
from telescope_train.batches.bundles import bundle_sizes
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.weighting import denominator, numerators
from telescope_train.step.credit import Credit, CreditRules, assign_credit
from telescope_train.step.distances import kl_penalties
from telescope_train.step.metrics import StepClock
from telescope_train.step.shaping import KlPenalties, RolloutKey

FULL = 0.85
"""Share of `seq_len` from which on a packed batch is computed before all groups have ended."""


class GradientStream:
    """The gradient of one step, over the groups that have ended."""

    def __init__(
        self,
        rules: CreditRules,
        packing: Packing,
        trainer: Ranks,
        version: WeightVersion,
        clock: StepClock,
    ) -> None:
        """`version`: that of the trained weights.

        `clock` gets the times of credit and packing, and of the trainer before and after them.
        """
        self._rules, self._packing = rules, packing
        self._trainer, self._version = trainer, version
        self._clock = clock
        self._weighting = rules.algorithm.weighting
        self._waiting: list[tuple[TrainingSample, float]] = []
        self._built: dict[RolloutKey, list[TrainingSample]] = {}
        self._kl = KlPenalties()
        self._shards: list[list[PackedBatch]] = [[] for _ in range(packing.num_ranks)]
        self._num_trained = 0
        self._num_early = 0
        self.weight_scale = 1.0
        """Factor for the weights of tokens at the end; known after `apply`."""

    @property
    def kl_penalties(self) -> KlPenalties:
        """KL penalties of every rollout so far."""
        return self._kl

    @property
    def built(self) -> Mapping[RolloutKey, Sequence[TrainingSample]]:
        """Samples of every trained rollout so far."""
        return self._built

    async def add(self, groups: Sequence[Group]) -> None:
        """Take the gradient of complete rounds of batches; keep the rest for later."""
        rules = self._rules
        # Tokens that ranks got before the last groups came did not have to wait for them.
        self._num_early = self._num_trained
        kl = await kl_penalties(groups, rules, self._packing, self._trainer)
        self._kl |= kl
        if kl.num_tokens:
            self._clock.lap("train")
        # In a thread, because rollouts go on in this event loop.
        credit = await asyncio.to_thread(assign_credit, groups, rules, kl_penalties=kl)
        weights = numerators(credit.samples, self._weighting).tolist()
        self._waiting += zip(credit.samples, weights, strict=True)
        for sample in credit.samples:
            self._built.setdefault(sample.rollout_key, []).append(sample)
        await self._accumulate(full_rounds([s for s, _ in self._waiting], self._packing))

    async def rest(self) -> None:
        """Take the gradient of the rest; the batch is complete."""
        await self._accumulate(range(len(self._waiting)))

    async def apply(self, credit: Credit) -> dict[str, float]:
        """Take the optimizer step; `credit` is that of the whole batch. Returns its metrics.

        Raises ConfigError if a group was credited differently when the batch was complete.
        """
        self._require_same(credit)
        if not credit.samples:
            return {}  # a batch without a gradient changes nothing
        total = denominator(credit.samples, self._weighting, max_tokens=self._packing.max_tokens)
        self.weight_scale = 1.0 / total
        learned = await self._trainer.apply_gradient(self.weight_scale)
        return learned | {"gradient/early_fraction": self._num_early / self._num_trained}

    @property
    def plan(self) -> StepPlan:
        """The work of the ranks, as one step."""
        is_empty = not any(self._shards)
        return StepPlan(
            minibatches=[] if is_empty else [self._shards], order=[] if is_empty else [0]
        )

    async def _accumulate(self, chosen: Sequence[int]) -> None:
        shards = self._packed(chosen)
        self._clock.lap("wait")
        if shards:
            await self._trainer.accumulate_gradient(shards, self._version)
            self._clock.lap("train")

    def _packed(self, chosen: Sequence[int]) -> list[list[PackedBatch]]:
        """Return the waiting samples at the indices `chosen` as batches of each rank, if any."""
        if not chosen:
            return []
        taken = set(chosen)
        parts = [self._waiting[index] for index in sorted(taken)]
        self._waiting = [one for index, one in enumerate(self._waiting) if index not in taken]
        weights_N = np.array([weight for _, weight in parts])
        shards = pack_with([sample for sample, _ in parts], weights_N, self._packing)
        for mine, new in zip(self._shards, shards, strict=True):
            mine += new
            self._num_trained += sum(batch.num_trained_tokens for batch in new)
        return shards

    def _require_same(self, credit: Credit) -> None:
        """Raise ConfigError unless the ranks have seen exactly the samples of `credit`."""
        assert not self._waiting, "rest comes before apply"
        # `assign_credit` uses what was built, unless the advantage of the rollout has changed.
        trained = {id(sample) for samples in self._built.values() for sample in samples}
        whole = {id(sample) for sample in credit.samples}
        if trained != whole:
            name = self._rules.algorithm.name
            raise ConfigError(
                f"the advantages of {name} depend on other groups of the batch, although it says "
                f'compares = "group"; set compares = "batch" in its record, or '
                "stream_gradients = false"
            )


def full_rounds(samples: Sequence[TrainingSample], packing: Packing) -> list[int]:
    """Return the indices of samples that fill batches for all ranks, as many as there are.

    Batches that are not full would cost time that is missing when the batch is complete.
    """
    parts = [(len(sample), [index]) for index, sample in enumerate(samples)]
    if packing.share_prefixes:
        parts = list(bundle_sizes(samples, seq_len=packing.seq_len))
    sizes_N = np.array([size for size, _ in parts], dtype=np.int64)
    if sizes_N.sum() < FULL * packing.seq_len * packing.num_ranks:
        return []
    bins = spread_over_ranks(sizes_N, seq_len=packing.seq_len, num_ranks=1)
    full = [one for one in bins if sizes_N[one].sum() >= FULL * packing.seq_len]
    whole_rounds = len(full) // packing.num_ranks * packing.num_ranks
    return [
        index for one in full[:whole_rounds] for part in one.tolist() for index in parts[part][1]
    ]
