"""`TrainerWorker`: one trainer rank, in this process. `ranks` places and calls the ranks.

Every method is collective: all ranks call it in the same order.
"""

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError

from telescope_core.base.errors import ConfigError, ProcessDiedError
from telescope_core.base.file_proofs import FileProof, write_sums
from telescope_core.records.room import room_for
from telescope_train.algorithms import load_algorithm, loss_function
from telescope_train.algorithms.policy_gradient import negative_log_likelihood
from telescope_train.algorithms.token_metrics import metric_row, reduce_metrics
from telescope_train.backends import load_backend
from telescope_train.backends.distributed_checkpoint import Saving, require_proved
from telescope_train.backends.progress import seed_everything
from telescope_train.backends.protocol import BackendSettings, BatchFacts
from telescope_train.backends.trainer_backend import GradientResult, Loss, UpdateResult
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import PackedBatch
from telescope_train.chat.tokenizer import vocabulary_size
from telescope_train.cluster.ports import HeldPort
from telescope_train.config.algorithm_section import AlgorithmSection
from telescope_train.diagnostics.rank_checks import Tolerance, check_rank
from telescope_train.models.attention.choice import PrefixSharing, no_sharing
from telescope_train.observability.spans import SpanRecorder
from telescope_train.trainer.progress import RankProgress
from telescope_train.weights.sending import WeightSending

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
# mallopt takes an int, so this is the largest threshold there is.
_KEPT_BYTES = 2**31 - 1

_GROWTH_BYTES = 64 * 2**20

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

UNWATCHED_WAIT_S = 600.0
"""Seconds for which ranks wait for each other if nobody checks their progress."""
WATCHED_WAIT_S = 30 * 24 * 3600.0
"""The same if somebody does, who ends ranks that are stuck, however slow others are."""
NO_PROOFS: Mapping[str, FileProof] = MappingProxyType({})
"""Proofs of a checkpoint without any, as `save_checkpoint` writes it."""
NEVER_SAMPLED = -2
"""Version that no token has, for weights between optimizer steps of one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Number of this rank, and place and time limit of the ranks' meeting."""

    rank: int = 0
    world_size: int = 1
    """Number of ranks."""
    address: str = "127.0.0.1"
    """The machine of rank 0."""
    port: int | None = None
    """Port on it that is free or reserved for rank 0; needed for more than one rank."""
    wait_s: float = UNWATCHED_WAIT_S
    """Longest wait for another rank in seconds, at the meeting and in collectives."""


ALONE = Meeting()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accumulated:
    """A part of the gradient of one step."""

    result: GradientResult
    old_logprobs_s: float
    gradient_s: float


class TrainerWorker:
    """One rank of the trainer. Call `close` when done; a process can have only one at a time."""

    def __init__(
        self,
        settings: BackendSettings,
        *,
        meeting: Meeting = ALONE,
        num_threads: int = 1,
        progress: RankProgress | None = None,
        held_port: HeldPort | None = None,
    ) -> None:
        """Join the other ranks, load the model and run the self-tests.

        `num_threads` limits CPU threads, because ranks and inference servers share the cores.
        `progress` is read in another thread. `held_port` holds the port at which the other ranks
        meet this one.
        """
        self._progress = progress or RankProgress()
        self._algorithm = settings.algorithm
        self._device = _device(settings)
        self._saving: Saving | None = None
        self._accumulated: list[_Accumulated] = []
        self._token_facts: list[BatchFacts] = []
        self.held_port = held_port or HeldPort()
        """Reserved port, from its announcement until this rank listens on it."""
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads)
            keep_freed_memory()
        elif settings.gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(settings.gpu_share, self._device)
        _join(self._device, meeting, self.held_port)
        try:
            seed_everything(settings.seed + meeting.rank)
            backend_class = load_backend(settings.trainer.train_backend)
            self.spans = SpanRecorder(
                self._device, times_gpu=settings.track_gpu_events, moved=self._progress.one
            )
            self._progress.activity = "loading the model"
            self.backend = backend_class(settings, _loss(settings), self._device, self.spans)
            self._sending = WeightSending(
                self.backend,
                settings.weights,
                device=self._device,
                held_port=self.held_port,
                counted=self._progress.each,
            )
            # Merged adapters are sent together with matrices that are frozen on purpose.
            self._sends_frozen = settings.trainer.use_lora and not settings.sends_adapter
            self._progress.activity = "testing itself"
            self.self_tests = check_rank(
                self.backend,
                vocab_size=vocabulary_size(settings.model),
                tolerance=Tolerance.from_dtype(settings.compute_dtype),
                exactness=_exactness(settings),
                reference_exactness=_reference_exactness(settings),
                has_other_reference=settings.reference_model is not None,
                shares_prefixes=not self.sharing.reason,
            )
            self.spans.take()  # what the self-tests did is no part of a step
        except BaseException:
            self.close()
            raise

    @property
    def sharing(self) -> PrefixSharing:
        """Whether samples of a row share prefixes; a backend without the attribute cannot."""
        return getattr(self.backend, "sharing", no_sharing("the backend cannot"))

    @property
    def activations(self) -> str:
        """Reason for the number of recomputed layers; empty if the settings fix it."""
        return getattr(self.backend, "activations", "")

    @property
    def gpu_name(self) -> str | None:
        """The GPU of this rank; None on CPU."""
        return torch.cuda.get_device_name() if self._device.type == "cuda" else None

    def train_step(self, batches: Sequence[PackedBatch], *, version: int) -> dict[str, float]:
        """Take an optimizer step over `batches`, this rank's share; returns metrics of all ranks.

        `version` is the version of the weights before the step.
        """
        return self.train_minibatches([batches], [0], version)

    def train_minibatches(
        self,
        minibatches: Sequence[Sequence[PackedBatch]],
        order: Sequence[int],
        version: int,
    ) -> dict[str, float]:
        """Take an optimizer step over `minibatches[i]` for each i of `order`.

        If the algorithm needs log-probs from before the first step, they are computed first.
        Metrics are over all tokens of all steps and all ranks. Raises ValueError for no steps.
        """
        if not order:
            raise ValueError("expected at least one optimizer step, got an empty order; skip it")
        started_s = time.perf_counter()
        self.spans.begin(version + 1)
        shares = self._with_old_logprobs(minibatches)
        prepared_s = time.perf_counter()
        gradients: list[GradientResult] = []
        updates: list[UpdateResult] = []
        optimizer_s = 0.0
        first_pass = set(order)
        self._token_facts = []
        for number, index in enumerate(order):
            # Only the first step sees the weights that the engine sampled from.
            present = version if number == 0 else NEVER_SAMPLED
            share = self._progress.over(shares[index])
            gradients.append(self.backend.accumulate_gradient(share, version=present))
            if index in first_pass:
                self._token_facts += gradients[-1].token_facts
                first_pass.remove(index)
            before_s = time.perf_counter()
            updates.append(self.backend.apply_gradient())
            optimizer_s += time.perf_counter() - before_s
        return {
            **update_row(gradients, updates),
            **self._unchanged_weights(),
            "time/old_logprobs_s": prepared_s - started_s,
            "time/gradient_s": time.perf_counter() - prepared_s - optimizer_s,
            "time/optimizer_s": optimizer_s,
        }

    def accumulate_gradient(self, batches: Sequence[PackedBatch], version: int) -> None:
        """Add the gradient of `batches`, this rank's share, to that of the next `apply_gradient`.

        `version` is the version of the present weights. Log-probs from before the step are of the
        same weights, so they are computed here for these batches alone.
        """
        started_s = time.perf_counter()
        self.spans.begin(version + 1)
        (share,) = self._with_old_logprobs([batches])
        prepared_s = time.perf_counter()
        result = self.backend.accumulate_gradient(self._progress.over(share), version=version)
        if not self._accumulated:
            self._token_facts = []
        self._token_facts += result.token_facts
        self._accumulated.append(
            _Accumulated(
                result=result,
                old_logprobs_s=prepared_s - started_s,
                gradient_s=time.perf_counter() - prepared_s,
            )
        )

    def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take an optimizer step with `scale` times the accumulated gradient.

        Metrics are over all tokens of all ranks. Raises ValueError if nothing was accumulated.
        """
        if not self._accumulated:
            raise ValueError("expected a gradient, got none; call accumulate_gradient first")
        started_s = time.perf_counter()
        update = self.backend.apply_gradient(scale)
        parts, self._accumulated = self._accumulated, []
        whole = GradientResult(
            loss=scale * sum(part.result.loss for part in parts),
            metrics=reduce_metrics(part.result.metrics for part in parts),
        )
        return {
            **update_row([whole], [update]),
            **self._unchanged_weights(),
            "time/old_logprobs_s": sum(part.old_logprobs_s for part in parts),
            "time/gradient_s": sum(part.gradient_s for part in parts),
            "time/optimizer_s": time.perf_counter() - started_s,
        }

    def _with_old_logprobs(
        self, minibatches: Sequence[Sequence[PackedBatch]]
    ) -> list[list[PackedBatch]]:
        """Return this rank's part of each minibatch, with the log-probs that stay fixed.

        Proximal and reference ones are computed before the first optimizer step of the batch, so
        every epoch and minibatch sees the same numbers. Each column costs one forward pass over all
        minibatches. Every rank calls it.
        """
        shares = [list(batches) for batches in minibatches]
        if self._algorithm is not None and self._algorithm.needs_proximal:
            shares = [
                [
                    replace(batch, proximal_logprobs_T=logprobs_T)
                    for batch, logprobs_T in zip(batches, self.logprobs(batches), strict=True)
                ]
                for batches in shares
            ]
        if self._algorithm is not None and _reads_reference(self._algorithm):
            shares = [
                [
                    replace(batch, reference_logprobs_T=logprobs_T)
                    for batch, logprobs_T in zip(
                        batches, self.reference_logprobs(batches), strict=True
                    )
                ]
                for batches in shares
            ]
        return shares

    def _unchanged_weights(self) -> dict[str, float]:
        """Return the share of weights that the previous step left unchanged; {} if not known."""
        return {} if self._sends_frozen else self._sending.unchanged()

    def take_token_facts(self) -> list[BatchFacts]:
        """Return and forget the facts about this rank's tokens of the last step, by batch.

        Batches are in the order in which the step first went over them.
        """
        found, self._token_facts = self._token_facts, []
        return found

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch under the reference model; see `logprobs`."""
        return self.backend.reference_logprobs(self._progress.over(batches))

    def update_reference(self) -> None:
        """Make the current weights the reference model."""
        self.backend.update_reference()

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch; 0 where a token is not trained on."""
        return self.backend.logprobs(self._progress.over(batches))

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole CPU tensor), tied tensors once.

        Every rank must read it to its end, because ranks gather each tensor together when it is
        yielded.
        """
        return self._progress.each(self.backend.export_weights())

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that servers need; see `TrainerBackend.transfer_weights`."""
        return self._progress.each(self.backend.transfer_weights())

    def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors that `send_weights` sends."""
        return self._sending.headers()

    def connect(self, place: Place, wait_s: float | None = None) -> None:
        """Open rank 0's end of the transfer; returns when all servers have joined.

        `wait_s`: longest wait for a server, here and while weights are sent; None = minutes.
        Raises TransferError if one does not.
        """
        self._sending.connect(place, wait_s)

    def stage_weights(self, wire: Wire) -> None:
        """Gather every tensor so that rank 0 can send it without the other ranks."""
        with self.spans.span("stage weights", on_cpu=True):
            self._sending.stage(wire, is_sender=dist.get_rank() == 0)

    def send_weights(self) -> str:
        """Gather every tensor; rank 0 sends it to the servers, and returns a digest of it all.

        Raises TransferError if a server did not take part.
        """
        with self.spans.span("send weights", on_cpu=True):
            return self._sending.send()

    def free_cached_memory(self) -> None:
        """Free GPU memory that holds no tensor, for a server on the same GPU."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def sent_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the last transfer, by name; on rank 0 only."""
        return self._sending.digests()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write everything needed to continue; the folder appears complete or not at all."""
        self.backend.save_checkpoint(folder)

    def start_checkpoint(self, folder: str | Path, with_training_state: bool) -> None:
        """Copy the state and write it to `folder` in the background; `finish_checkpoint` later."""
        assert self._saving is None, "finish_checkpoint comes first"
        with self.spans.span("copy for checkpoint", on_cpu=True):
            self._saving = self.backend.start_checkpoint(
                folder, with_training_state=with_training_state
            )

    def checkpoint_is_written(self) -> bool:
        """Return whether `finish_checkpoint` would return at once."""
        return self._saving is None or self._saving.is_done()

    def finish_checkpoint(self) -> dict[str, FileProof]:
        """Wait for the write that `start_checkpoint` began; raises TelescopeError if it failed.

        Returns the proof of each file that this rank wrote, by its name in the folder.
        """
        saving, self._saving = self._saving, None
        return {} if saving is None else saving.wait()

    def load_checkpoint(
        self, folder: str | Path, proofs: Mapping[str, FileProof] = NO_PROOFS
    ) -> None:
        """Continue from the checkpoint in `folder`, whose files must match `proofs`."""
        with self.spans.span("load checkpoint", on_cpu=True):
            require_proved(Path(folder), proofs, self._progress.one)
            self.backend.load_checkpoint(folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Export to Hugging Face format; the folder appears complete or not at all."""
        with room_for(Path(folder), SafetensorError):
            self.backend.save_pretrained(folder)
            if dist.get_rank() == 0:
                write_sums(Path(folder), "*.safetensors", self._progress.one)

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        self.held_port.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def update_row(
    gradients: Sequence[GradientResult], updates: Sequence[UpdateResult]
) -> dict[str, float]:
    """Return one row of metrics for all optimizer steps of one batch."""
    norms = [update.gradient_norm for update in updates]
    changed = [update.changed for update in updates if update.changed is not None]
    kept = [update.keeps_gradient for update in updates if update.keeps_gradient is not None]
    return {
        "loss/total": sum(gradient.loss for gradient in gradients) / len(gradients),
        **metric_row(reduce_metrics(gradient.metrics for gradient in gradients)),
        "grad_norm": sum(norms) / len(norms),
        "grad_norm/max": max(norms),
        "learning_rate": updates[-1].learning_rate,
        "optimizer/steps": float(len(updates)),
        "optimizer/skipped": float(sum(update.is_skipped for update in updates)),
        **({"optimizer/changed_weights": sum(changed) / len(changed)} if changed else {}),
        **({"optimizer/kept_gradients": float(sum(kept))} if kept else {}),
    }


def _device(settings: BackendSettings) -> torch.device:
    """Return the device of this rank. Ray makes only the rank's own GPU visible, as number 0."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "expected a GPU for this trainer rank, but torch finds none that it can use; compare "
            "the driver (nvidia-smi) with torch's CUDA version, or set CUDA_VISIBLE_DEVICES to an "
            "empty value to train on the CPU"
        )
    return torch.device("cuda", 0)


def _join(device: torch.device, meeting: Meeting, held_port: HeldPort) -> None:
    """Create the process group; a single rank needs no port."""
    rank, world_size = meeting.rank, meeting.world_size
    address, port = meeting.address, meeting.port
    if dist.is_initialized():
        raise ConfigError(
            "this process already has a trainer rank; close it first, or start another process"
        )
    timeout = timedelta(seconds=meeting.wait_s)
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        assert port is not None, "more than one rank needs a port to meet at"
        try:
            store = dist.TCPStore(
                address,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timeout,
                master_listen_fd=held_port.hand_over(port),
            )
        except dist.DistError as error:
            raise ProcessDiedError(
                f"trainer rank {rank} of {world_size} cannot reach the others at "
                f"{address}:{port}: {error}"
            ) from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        name = os.environ.get(_INTERFACE_VARIABLE)
        if name is None or name not in str(error):
            raise
        raise ConfigError(
            f"{_INTERFACE_VARIABLE}={name}: expected a network interface of this machine "
            f"({', '.join(sorted(psutil.net_if_addrs()))}); name one of them, or unset it"
        ) from error


def _loss(settings: BackendSettings) -> Loss:
    if settings.algorithm is None:
        return negative_log_likelihood
    return loss_function(settings.algorithm)


def _exactness(settings: BackendSettings) -> float | None:
    """Return how much a repeated forward pass may differ, nats; None = it is random.

    On a GPU or with a compiler other kernels may be picked. Log-probs travel in float32, so those
    of a model in float64 are rounded.
    """
    if settings.trainer.use_lora and settings.trainer.lora_dropout:
        return None
    if settings.device != "cpu" or settings.trainer.compile:
        return 1e-2
    return 1e-6 if settings.compute_dtype == "float64" else 0.0


def _reads_reference(section: AlgorithmSection) -> bool:
    """Return whether the loss reads log-probs of the reference model."""
    return section.kl_in_loss or load_algorithm(section.algorithm).needs_reference


def _reference_exactness(settings: BackendSettings) -> float | None:
    """Return how much the reference may differ from the policy, nats; None = nothing is known.

    Both are the same model before the first step, unless it is another one. Adapters add zeros to
    sums that are rounded, and a compiler may fuse, and so round, one of two models otherwise.
    """
    if settings.algorithm is None or not settings.algorithm.needs_reference:
        return None
    if settings.reference_model is not None:
        return None
    rounding = Tolerance.from_dtype(settings.compute_dtype).nats
    if settings.trainer.use_lora:
        return rounding
    exactness = _exactness(settings)
    if settings.trainer.compile and exactness is not None:
        return max(exactness, rounding)
    return exactness


def keep_freed_memory() -> None:
    """Keep freed memory in this process instead of giving it back to the system.

    glibc returns each large block at once and asks for it again, so a training step on the CPU
    spends a fifth of its time in page faults. Does nothing if the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option, value in (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    ):
        mallopt(option, value)
