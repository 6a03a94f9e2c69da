"""The input of the trainer: one `TrainingSample` per chain of tokens, packed into `PackedBatch`es.

Plain numpy, so it travels between processes without torch. Every `_T` array is aligned with the
token it describes: entry t of the mask, log-probs and weights belongs to `token_ids[t]`, which the
model predicts from position t-1. So the first token of a sequence is never trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Span


class TurnPart(NamedTuple):
    """The tokens of one turn of the policy in a sample."""

    turn: int
    """Number of the turn in its rollout, 0 first."""
    num_tokens: int


class Origin(NamedTuple):
    """The rollout and the turns of a sample."""

    group_id: str
    index: int
    """Position of the rollout in its group."""
    attempt: int
    turns: tuple[TurnPart, ...]
    """In order; together they hold all trained tokens of the sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """One chain of tokens of one rollout, with all that is needed to learn from it. L = length."""

    token_ids: NDArray[np.int32]
    """[L] prompt, completions and the tokens between them, exactly as the server saw them."""
    mask: NDArray[np.bool_]
    """[L] True where the policy wrote the token in this chain."""
    behavior_logprobs: NDArray[np.float32]
    """[L] log-prob under the distribution that was sampled, nats; NaN where the mask is False."""
    advantage: float
    """Advantage of its rollout, which every trained token gets."""
    temperature: float
    """Temperature of the sampler, by which the trainer divides its logits too."""
    oldest_version: int
    """Version of the weights that sampled the first of its trained tokens."""
    newest_version: int
    """Version of the weights that sampled the last of its trained tokens."""
    group_id: str
    rollout_index: int
    """Position of the rollout in its group."""
    environment: str
    spans: tuple[Span, ...] = ()
    """Versions of the weights for its trained tokens, in order; empty = only the ends are known."""
    attempt: int = 1
    """Number of the attempt at the rollout."""
    turns: tuple[TurnPart, ...] = ()
    """The turns that contain its trained tokens, in order; empty = not known."""
    routes: NDArray[np.int16] | None = None
    """[L, layers, chosen] the experts that computed each token; -1 = not known. None = no
    routes."""

    def __post_init__(self) -> None:
        """Raise unless the arrays describe one sequence with at least one trained token."""
        lengths = (len(self.token_ids), len(self.mask), len(self.behavior_logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(f"{self.label}: ids, mask and log-probs have lengths {lengths}")
        if not self.mask.any() or self.mask[0]:
            raise ValueError(f"{self.label}: expected a prompt followed by trained tokens")

    def __len__(self) -> int:
        """Return the number of tokens in the chain, prompt included."""
        return len(self.token_ids)

    @property
    def version_spans(self) -> tuple[Span, ...]:
        """Versions of the weights for its trained tokens; if not known, all count as the oldest."""
        return self.spans or (Span(self.oldest_version, int(self.mask.sum())),)

    @property
    def label(self) -> str:
        """Name of the sample in messages."""
        return f"rollout {self.rollout_index} of group {self.group_id!r} ({self.environment})"

    @property
    def rollout_key(self) -> tuple[str, int]:
        """The rollout as (group id, index), which all its chains share."""
        return self.group_id, self.rollout_index

    @property
    def origin(self) -> Origin:
        """The rollout and turns of this sample."""
        return Origin(self.group_id, self.rollout_index, self.attempt, self.turns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Samples laid end to end: one forward and backward pass of one rank.

    T = tokens in it, S = samples.
    """

    token_ids_T: NDArray[np.int32]
    """[T] ids; padding at the end."""
    positions_T: NDArray[np.int32]
    """[T] 0, 1, 2 ... restarting at each sample."""
    sequence_ids_T: NDArray[np.int32]
    """[T] index of a token's sample, counted from 0 in this batch; -1 for padding."""
    mask_T: NDArray[np.bool_]
    """[T] True where the policy wrote the token."""
    behavior_logprobs_T: NDArray[np.float32]
    """[T] nats; 0 where the mask is False."""
    advantages_T: NDArray[np.float32]
    """[T] the advantage of the token's rollout."""
    weights_T: NDArray[np.float64]
    """[T] share of the token in the step's loss; 0 where the mask is False. It is only ever
    summed."""
    temperatures_T: NDArray[np.float32]
    """[T] the sampler's temperature, by which logits are divided."""
    versions_T: NDArray[np.int32]
    """[T] the oldest weight version of the token's sample. It equals the trainer's version only if
    every trained token of the sample was sampled under that version. -1 for padding."""
    proximal_logprobs_T: NDArray[np.float32] | None = None
    """[T] nats, computed by the trainer itself before the first optimizer step of the batch; None =
    not recomputed."""
    reference_logprobs_T: NDArray[np.float32] | None = None
    """[T] nats, of the reference model; None = no reference model."""
    routes_TLK: NDArray[np.int16] | None = None
    """[T, layers, chosen] the experts that computed each token for the sampler; -1 = not known.
    None = of none: a mixture chooses by itself."""
    origins: tuple[Origin, ...] = ()
    """The rollout and turns of each sample, in order; empty for padding."""
    shared_S: NDArray[np.int64] | None = None
    """[S] tokens at the start of each sample that are those of the sample before it: a model may
    compute them once. Every column holds them for each sample all the same. None = nothing is
    shared, and a backend that cannot share gets no other batches."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding; tokens that samples share count for each of them."""
        return int(np.count_nonzero(self.sequence_ids_T >= 0))

    @property
    def num_shared_tokens(self) -> int:
        """Number of tokens that are not computed, because an earlier sample has them too."""
        return 0 if self.shared_S is None else int(self.shared_S.sum())

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that the layers of the model compute, without padding."""
        return self.num_tokens - self.num_shared_tokens

    @property
    def lengths_S(self) -> NDArray[np.int64]:
        """[S] tokens of each sample."""
        return np.bincount(self.sequence_ids_T[self.sequence_ids_T >= 0])

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return int(np.count_nonzero(self.mask_T))


Shards: TypeAlias = Sequence[Sequence[PackedBatch]]
"""[rank][batch], the same number of batches on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The trainer's work on one batch of rollouts."""

    minibatches: Sequence[Shards]
    """[minibatch][rank][batch]; no minibatch is empty."""
    order: Sequence[int]
    """The minibatch of each optimizer step, epoch after epoch."""

    @property
    def packed(self) -> list[PackedBatch]:
        """All batches, each once, regardless of the number of epochs."""
        return [batch for shards in self.minibatches for shard in shards for batch in shard]

    @property
    def num_shared_tokens(self) -> int:
        """Number of tokens of all batches that are not computed, as another sample has them."""
        return sum(batch.num_shared_tokens for batch in self.packed)

    @property
    def first_pass(self) -> list[Shards]:
        """The minibatches in the order of their first use."""
        return [self.minibatches[index] for index in dict.fromkeys(self.order)]

    def of_rank(self, rank: int) -> list[Sequence[PackedBatch]]:
        """Return the share of `rank` in each minibatch."""
        return [shards[rank] for shards in self.minibatches]
