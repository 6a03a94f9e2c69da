"""The seams of a trainer backend: one rank from inside, and all ranks as the driver calls them.

Every method of `TrainerBackend` is collective: all ranks call it, in the same order, with equally
many batches. Ranks that share rows (`fsdp_context_parallel_size`, neighbors) are given the same
batches. `Ranks` is implemented in `telescope_train.trainer.ranks`, whatever the backend.
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
from telescope_train.batches.batch import PackedBatch, Shards, StepPlan
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
    def from_config(cls, config: TrainConfig, *, device: Device) -> "BackendSettings":
        """Take what ranks need from the configuration of `telescope train`."""
        return cls(
            model=config.model,
            trainer=config.trainer,
            algorithm=algorithm_in_use(config),
            seed=config.run.seed,
            number_of_steps=config.num_optimizer_steps,
            device=device,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a receiver of weights must know before a tensor comes."""

    name: str
    """As Hugging Face names it."""
    dtype: str
    """`float32`, `bfloat16`."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorHeader":
        """Describe `tensor`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name=name, dtype=dtype, shape=tuple(tensor.shape))


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


class Ranks(Protocol):
    """All trainer ranks of a run, called together: what the loop, checkpoints and weights use.

    A call returns when every rank has answered, and raises what the first rank raised, or
    ProcessDiedError where a rank is gone.
    """

    @property
    def num_ranks(self) -> int:
        """How many shards a step has: ranks that share rows count once."""
        ...

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the optimizer steps of `plan`; returns metrics over all of them and all ranks.

        `version` is that of the weights before the first of them.
        """
        ...

    async def logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T, nats, of [rank][batch] under the present weights; 0 if not trained."""
        ...

    async def reference_logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Like `logprobs`, under the reference model."""
        ...

    async def update_reference(self) -> None:
        """Make the present weights the reference model."""
        ...

    async def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors in the order in which `send_weights` sends them."""
        ...

    async def meeting_point(self) -> tuple[str, int]:
        """Return (host, free port) of rank 0's machine, where servers can meet it."""
        ...

    async def connect(self, host: str, port: int, world_size: int) -> None:
        """Open rank 0's end of the weight transfer; returns when every server has joined."""
        ...

    async def send_weights(self) -> None:
        """Send every tensor once, to all servers."""
        ...

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Copy the state and begin to write it to `folder`; training may go on."""
        ...

    async def checkpoint_is_written(self) -> bool:
        """Return whether nothing is left to write, or writing failed."""
        ...

    async def finish_checkpoint(self) -> None:
        """Wait for all parts; raises TelescopeError when one could not be written."""
        ...

    async def load_checkpoint(self, folder: Path) -> None:
        """Continue from the state in `folder`, whatever number of ranks wrote it."""
        ...

    async def save_pretrained(self, folder: Path) -> None:
        """Export the model to Hugging Face format, tokenizer included."""
        ...

    async def close(self) -> None:
        """End the ranks. Idempotent."""
        ...
