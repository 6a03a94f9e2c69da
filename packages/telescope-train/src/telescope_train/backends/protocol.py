"""The seam to a trainer backend: one rank's share of the model, and one optimizer step at a time.

Every method is collective: all ranks call it, in the same order, with equally many batches. Ranks
that share rows (`fsdp_context_parallel_size`, neighbours) are given the same batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.algorithms.corrections import algorithm_in_use
from telescope_train.algorithms.terms import Terms, TokenLoss
from telescope_train.algorithms.token_metrics import MetricSum
from telescope_train.backends.distributed_checkpoint import Saving
from telescope_train.batches.batch import PackedBatch
from telescope_train.config.schema import (
    AlgorithmSection,
    ModelSection,
    TrainConfig,
    TrainerSection,
)
from telescope_train.models.attention.choice import AttentionChoice
from telescope_train.models.device import Device, compute_dtype, machine_device

Loss: TypeAlias = Callable[[Terms], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The part of a configuration that trainer ranks read; it travels to their processes."""

    model: ModelSection
    trainer: TrainerSection
    algorithm: AlgorithmSection | None
    """None = supervised: the negative log-likelihood of the trained tokens."""
    seed: int
    number_of_steps: int
    """Optimizer steps; the learning-rate schedule ends there."""
    device: Device = field(default_factory=machine_device)
    """What the ranks compute on; decided once, by the driver."""

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype that layers compute in."""
        return compute_dtype(self.model.mixed_precision_dtype, self.device)

    @classmethod
    def from_config(cls, config: TrainConfig) -> "BackendSettings":
        """Take what ranks need from the configuration of `telescope train`."""
        return cls(
            model=config.model,
            trainer=config.trainer,
            algorithm=algorithm_in_use(config),
            seed=config.run.seed,
            number_of_steps=config.num_optimizer_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """What forward and backward passes over a step's batches gave, over all ranks."""

    loss: float
    """The weighted sum whose gradient was taken."""
    metrics: dict[str, MetricSum]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What became of a gradient."""

    gradient_norm: float
    """Global, before clipping."""
    learning_rate: float
    is_skipped: bool
    """The norm was not finite; weights and optimizer are as before."""


class TrainerBackend(Protocol):
    """One rank of a model in training."""

    attention: AttentionChoice
    """What keeps packed samples apart, as its own self-test found."""

    def __init__(self, settings: BackendSettings, loss: Loss, device: torch.device) -> None:
        """Load and shard the model; the process group exists."""
        ...

    def accumulate_gradient(
        self, batches: Sequence[PackedBatch], *, version: int
    ) -> GradientResult:
        """Add the gradient of the summed, weighted loss of `batches`, over all ranks.

        `version` is that of the present weights: tokens sampled under it measure the mismatch
        between the inference engine and this backend.
        """
        ...

    def apply_gradient(self) -> UpdateResult:
        """Clip, step the optimizer and the schedule, and forget the gradient."""
        ...

    def rehearse_step(self) -> int:
        """Step at learning rate 0, forget the gradient and what the optimizer learned from it.

        Returns how many weight tensors changed by a bit, over all ranks; only before the first
        step.
        """
        ...

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return, for each of this rank's batches, logprobs_T of trained tokens; 0 elsewhere."""
        ...

    def transformers_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Like `logprobs`, from the whole logits of the model's own forward; slow, for checks."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Like `logprobs`, of the reference model; only where the algorithm needs one."""
        ...

    def update_reference(self) -> None:
        """Make the reference model equal to the present weights."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the CPU) as Hugging Face names them; tied ones once."""
        ...

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `export_weights`, only what a server that loaded the initial model must renew."""
        ...

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write all that a later run needs to continue with the same numbers."""
        ...

    def start_checkpoint(self, folder: str | Path, *, with_training_state: bool) -> Saving:
        """Begin to write to `folder` what training cannot change any more; wait for it later.

        Without `with_training_state` the weights alone, which can be exported but not resumed.
        """
        ...

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from what `save_checkpoint` wrote, on as many ranks or on others."""
        ...

    def save_pretrained(self, folder: str | Path) -> None:
        """Export to Hugging Face format, tokenizer included; rank 0 writes."""
        ...
