"""The driver's view of trainer ranks: their settings, their results, and calls to all of them.

`Ranks` is implemented in `telescope_train.trainer.ranks` for all backends. One rank from inside is
`TrainerBackend`, in `telescope_train.backends.trainer_backend`, which needs torch; this needs none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError, ProcessDiedError, TelescopeError
from telescope_core.base.file_proofs import FileProof
from telescope_train.algorithms.corrections import algorithm_in_use
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import Shards, StepPlan
from telescope_train.config.inference_section import WeightsSection
from telescope_train.config.schema import (
    AlgorithmSection,
    ModelSection,
    TrainConfig,
    TrainerSection,
)
from telescope_train.config.trainer_section import MegatronSection
from telescope_train.models.device import Device, compute_dtype, machine_device
from telescope_train.models.served_adapter import served_adapter


class RankDiedError(ProcessDiedError):
    """A trainer rank died, or no rank makes progress. All ranks can be restarted."""


class GpuMemoryError(TelescopeError):
    """A trainer rank needs more memory than its GPU has left."""

    WHILE = ""
    """Its work, where that decides what needs less memory."""

    @classmethod
    def of(cls, process: str, error: Exception) -> "GpuMemoryError":
        """Return what torch's `error` in `process` means."""
        # After two sentences of sizes come others about torch's allocator: they are in the log.
        sizes = ". ".join(str(error).split(". ")[1:3]) or str(error)
        return cls(f"{process} ran out of GPU memory{cls.WHILE}: {sizes.removesuffix('.')}")


class TransferMemoryError(GpuMemoryError):
    """The same in an update of weights, in which a rank holds no activations."""

    WHILE = " while it gathered and sent weights"


class TransferError(TelescopeError):
    """Weights could not be sent, because of a receiver."""


class DamagedStateError(ConfigError):
    """Files of a saved state differ from those that were written; nothing was loaded."""

    def __init__(self, folder: Path, wrong: Sequence[str]) -> None:
        """`folder`: that of the state. `wrong`: one line for each file."""
        super().__init__(folder, wrong)  # made anew from these where another process raised it
        self.folder, self.wrong = folder, tuple(wrong)

    def __str__(self) -> str:
        """Return the folder and the damaged files."""
        return f"{self.folder} is damaged: {'; '.join(self.wrong)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The part of a configuration that trainer ranks read; it is sent to their processes."""

    model: ModelSection
    trainer: TrainerSection
    algorithm: AlgorithmSection | None
    """None = supervised training on the negative log-likelihood of the trained tokens."""
    seed: int
    """Seed of each rank's generators, together with its number, and alone of what all ranks draw
    alike: first adapters, and the rounding of moments."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    number_of_steps: int
    """Optimizer steps after which the learning-rate schedule ends."""
    device: Device = field(default_factory=machine_device)
    """The device of the ranks, chosen once by the driver."""
    weights: WeightsSection = field(default_factory=WeightsSection)
    """Settings for gathering and sending weights."""
    sends_adapter: bool = False
    """Whether servers get a LoRA adapter, instead of matrices with the adapter merged."""
    record_token_facts: bool = False
    """Whether to keep each pass's facts about each trained token, for the records."""
    longest_sequence: int = 0
    """Most tokens of a sequence, prompt and answer together; 0 = not known."""
    track_gpu_events: bool = True
    """Whether to time GPU work by events in its stream."""
    gpu_share: float = 1.0
    """Largest share of its GPU that the tensors of a rank may take."""

    @property
    def reference_model(self) -> str | None:
        """Another model that is the reference; None = the initial model, or there is none."""
        return None if self.algorithm is None else self.algorithm.reference_model

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype in which layers compute."""
        return compute_dtype(self.model.mixed_precision_dtype, self.device)

    @classmethod
    def from_config(cls, config: TrainConfig, *, device: Device) -> "BackendSettings":
        """Return the settings that ranks need, from the configuration of `telescope train`."""
        return cls(
            model=config.model,
            trainer=config.trainer,
            megatron=config.megatron,
            algorithm=algorithm_in_use(config),
            seed=config.run.seed,
            number_of_steps=config.num_optimizer_steps,
            device=device,
            weights=config.weights,
            sends_adapter=served_adapter(config) is not None,
            record_token_facts=config.observability.record_token_facts,
            track_gpu_events=config.observability.track_gpu_events,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFacts:
    """Facts about the M trained tokens of a batch from one pass, in batch order."""

    logprobs_M: NDArray[np.float32]
    """[M] nats."""
    entropy_M: NDArray[np.float16]
    """[M] nats."""
    effective_advantages_M: NDArray[np.float16]
    """[M] minus the derivative of each token's loss with respect to its log-prob, unweighted."""


class Ranks(Protocol):
    """All trainer ranks of a run, called together by the loop, checkpoints and weight updates.

    A call returns when every rank has answered. It raises what the first failing rank raised, or
    ProcessDiedError if a rank has died.
    """

    @property
    def num_ranks(self) -> int:
        """Number of shards of a step: ranks that share rows count once."""
        ...

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the optimizer steps of `plan`; returns metrics over all of them and all ranks.

        `version` is the version of the weights before the first step.
        """
        ...

    async def accumulate_gradient(self, shards: Shards, version: int) -> None:
        """Add the gradient of `shards` to that of the next `apply_gradient`.

        `version` is the version of the present weights.
        """
        ...

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take one optimizer step with `scale` times the accumulated gradient; returns metrics."""
        ...

    async def take_token_facts(self) -> list[list[BatchFacts]]:
        """Return and forget the facts of the tokens of the last step, by [rank][batch].

        Batches are in the order in which the step first went over them. Each rank has none if facts
        are not recorded.
        """
        ...

    async def logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T [T], nats, by [rank][batch]; 0 where a token is not trained on."""
        ...

    async def reference_logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return log-probs like `logprobs`, of the reference model."""
        ...

    async def update_reference(self) -> None:
        """Make the current weights the reference model."""
        ...

    async def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors of `send_weights`, in the order in which they are sent."""
        ...

    async def meeting_point(self) -> tuple[str, int]:
        """Return (host, port) of rank 0's machine, where servers can connect to it."""
        ...

    async def connect(self, place: Place, *, wait_s: float | None = None) -> None:
        """Open rank 0's end of the weight transfer; returns when every server has joined.

        `wait_s`: longest wait for a server, here and while weights are sent; None = minutes.
        Raises TransferError if one does not.
        """
        ...

    async def stage_weights(self, wire: Wire) -> None:
        """Prepare to send the present weights, as far as that is possible without servers.

        Until the weights change, every call of `send_weights` sends the staged tensors.
        """
        ...

    async def send_weights(self) -> str:
        """Send every tensor once, to all servers, and return a digest of all of them.

        Raises TransferError if a server did not take part; nothing is sent until the next
        `connect` then.
        """
        ...

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the last transfer, by name."""
        ...

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Copy the state and start writing it to `folder`; training may continue meanwhile."""
        ...

    async def checkpoint_is_written(self) -> bool:
        """Return whether every rank has finished writing or failed."""
        ...

    async def finish_checkpoint(self) -> Mapping[str, FileProof]:
        """Wait for all parts; raises TelescopeError if one could not be written.

        Returns the proofs of the files by their names in the folder, as far as ranks know them.
        """
        ...

    async def load_checkpoint(self, folder: Path, proofs: Mapping[str, FileProof]) -> None:
        """Continue from the state in `folder`, whatever the number of ranks that wrote it.

        `proofs` holds the proofs of its files, which are read and compared first; empty if they are
        not known. Raises DamagedStateError if a file has changed since it was written.
        """
        ...

    async def save_pretrained(self, folder: Path) -> None:
        """Export the model to Hugging Face format, tokenizer included."""
        ...

    async def close(self) -> None:
        """End the ranks. Idempotent."""
        ...
