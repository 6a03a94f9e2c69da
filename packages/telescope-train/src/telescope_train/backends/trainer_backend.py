"""The protocol of one rank of a trainer backend, as seen by the process that holds it.

Every method of `TrainerBackend` but `rank_layout` is collective: all ranks call it in the same
order, with the same number of batches. Ranks of the same shard (`RankLayout.shard_of`) get the same
batches. The driver's view of the ranks is in `telescope_train.backends.protocol`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.algorithms.terms import Terms, TokenLoss
from telescope_train.algorithms.token_metrics import MetricSum
from telescope_train.backends.distributed_checkpoint import Saving
from telescope_train.backends.protocol import BackendSettings, BatchFacts
from telescope_train.backends.transfer import TensorHeader
from telescope_train.batches.batch import PackedBatch
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.attention.choice import AttentionChoice, PrefixSharing
from telescope_train.observability.spans import SpanRecorder

Loss: TypeAlias = Callable[[Terms], TokenLoss]
"""Returns the unweighted loss of each token; the backend weights and sums it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """The result of forward and backward passes over a step's batches, over all ranks."""

    loss: float
    """The weighted sum whose gradient was taken."""
    metrics: dict[str, MetricSum]
    """Sums over all trained tokens, by metric."""
    token_facts: Sequence[BatchFacts] = ()
    """Facts of each batch of this rank; empty if they are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The outcome of applying a gradient."""

    gradient_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """The rate that the step used."""
    is_skipped: bool
    """Whether the norm was not finite, so that weights and optimizer did not change."""
    changed: float | None = None
    """Share of the weights with a gradient that have another value now; None = not measured, as of
    weights that are kept in float32."""
    keeps_gradient: bool | None = None
    """Whether the gradient is still there after it was applied, and will be added to the next one;
    None = not looked at."""


class TrainerBackend(Protocol):
    """One rank of a model in training."""

    attention: AttentionChoice
    """The attention chosen by its self-test to keep packed samples apart."""
    sharing: PrefixSharing
    """Whether its rows can share prefixes; if not, batches never do."""

    @staticmethod
    def rank_layout(settings: BackendSettings, num_ranks: int) -> RankLayout:
        """Return how `num_ranks` ranks divide the work; called before any of them starts.

        Raises ConfigError if the settings do not divide them.
        """
        ...

    def __init__(
        self,
        settings: BackendSettings,
        loss: Loss,
        device: torch.device,
        spans: SpanRecorder | None = None,
    ) -> None:
        """Load and shard the model; the process group exists already.

        `spans` records the durations of: `forward` and `backward` of each microbatch, `gradient
        reduction`, `gradient norm`, `optimizer`, `logprobs`, `reference logprobs`.
        """
        ...

    def accumulate_gradient(
        self, batches: Sequence[PackedBatch], *, version: int
    ) -> GradientResult:
        """Add the gradient of the summed, weighted loss of `batches`, over all ranks.

        `version` is the version of the current weights. Tokens sampled under it show the mismatch
        between the inference engine and this backend.
        """
        ...

    def apply_gradient(self, scale: float = 1.0) -> UpdateResult:
        """Multiply the gradient by `scale`, clip it, step the optimizer and clear the gradient."""
        ...

    def rehearse_step(self) -> int:
        """Step at learning rate 0, then clear the gradient and the optimizer's state.

        Returns the number of weight tensors that changed by a bit, the largest over all ranks.
        Allowed only before the first step.
        """
        ...

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch of this rank; 0 where not trained on."""
        ...

    def transformers_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Like `logprobs`, from the full logits of the model's own forward; slow, for checks."""
        ...

    def head_difference(self) -> float:
        """Return the differences of the head's log-probs and entropies from transformers', nats.

        Both are computed in float32 from given hidden states, some of which make logits beyond any
        soft cap, so it does not depend on the dtype of the layers.
        """
        ...

    def reference_logprobs(
        self, batches: Sequence[PackedBatch], *, by_transformers: bool = False
    ) -> list[NDArray[np.float32]]:
        """Return log-probs like `logprobs`, of the reference model if the algorithm needs one.

        `by_transformers`: like `transformers_logprobs`; needed only where it is another model.
        """
        ...

    def update_reference(self) -> None:
        """Make the reference model equal to the current weights."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor on the CPU); tied tensors once."""
        ...

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that servers need: only those that can differ from the initial model.

        Tensors are whole, on the device that the ranks communicate on, in the dtype that servers
        compute in. With `sends_adapter` they are the matrices of the adapter, under their names in
        a peft file.
        """
        ...

    def transfer_headers(self) -> Sequence[TensorHeader]:
        """Describe the tensors of `transfer_weights`, in order, without gathering any of them."""
        ...

    def without_gradient_buffers(self) -> AbstractContextManager[None]:
        """Free the memory of gradients inside the block, in which weights are gathered.

        There is no gradient then; a backend that keeps no buffers between steps does nothing.
        """
        ...

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write everything that a later run needs to continue with the same numbers."""
        ...

    def start_checkpoint(self, folder: str | Path, *, with_training_state: bool) -> Saving:
        """Copy the state and start writing the copy to `folder`; `wait` for it later.

        Without `with_training_state` only the weights are written. They can be exported, but
        training cannot resume from them.
        """
        ...

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from a saved checkpoint, with any number of ranks."""
        ...

    def save_pretrained(self, folder: str | Path) -> None:
        """Export to Hugging Face format, tokenizer included; rank 0 writes."""
        ...
