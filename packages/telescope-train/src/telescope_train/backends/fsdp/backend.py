"""Backend `fsdp`: torch FSDP2, one model over data-parallel ranks; gloo on CPU, NCCL on CUDA.

Master weights stay in `model_dtype`, and layers compute in `mixed_precision_dtype`. Gradients are
summed over micro-batches and ranks and never averaged, because the token weights already contain
the only denominator. Dims: T tokens of a row, M trained tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule

from telescope_train.backends.distributed_checkpoint import Saving, save_state, start_saving
from telescope_train.backends.fsdp import state as fsdp_state
from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.backends.fsdp.muon import hidden_matrices
from telescope_train.backends.fsdp.optimizer import make_optimizer, set_learning_rate
from telescope_train.backends.fsdp.policy import ShardedPolicy, load_policy, load_reference
from telescope_train.backends.fsdp.reference import AdaptersAside, FrozenCopy, Reference, load_moved
from telescope_train.backends.fsdp.sharding import (
    gather_values,
    local_part,
    reshard,
    time_reductions,
    whole,
    without_content,
)
from telescope_train.backends.progress import Progress, RoundedWeights, checksums, scheduled_rate
from telescope_train.backends.protocol import BackendSettings
from telescope_train.backends.step_loss import StepLoss, in_batch
from telescope_train.backends.trainer_backend import GradientResult, Loss, UpdateResult
from telescope_train.backends.transfer import TensorHeader
from telescope_train.batches.batch import PackedBatch
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.adaptive_checkpointing import GIB, AdaptiveCheckpointing
from telescope_train.models.file_names import as_in_files
from telescope_train.models.load import torch_dtype
from telescope_train.models.lora import (
    adapter_weights,
    dropout_on,
    merged_blocks,
    merged_weights,
    scaled_adapter,
)
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.row import PackedRow, packed_row, require_known_tokens
from telescope_train.observability.spans import SilentRecorder, SpanRecorder

LEFT_SHARE = 0.1
"""Share of a GPU's memory that is left free, because blocks of memory leave gaps."""
LOGITS_BYTES = 2**28
"""Size of two blocks of float32 logits on a GPU, which `logprobs` limits to this."""
CPU_SHARE = 0.5
"""Share of a machine's free memory that its ranks use; servers and environments grow too."""

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux shows a container its limits."""


class FsdpBackend:
    """One rank of the model; see `TrainerBackend`."""

    def __init__(
        self,
        settings: BackendSettings,
        loss: Loss,
        device: torch.device,
        spans: SpanRecorder | None = None,
    ) -> None:
        self._settings = settings
        self._spans = spans or SilentRecorder()
        self._loss = loss
        self._device = device
        self._layout = self.rank_layout(settings, dist.get_world_size())
        loaded = load_policy(settings, device, self._layout, moved=self._spans.moved)
        self._policy, self.attention = loaded.policy, loaded.attention
        self._computing = loaded.computing
        self.sharing = loaded.sharing
        self._checkpointing = loaded.checkpointing
        self.activations = ""
        """Reason, for people, for the number of recomputed layers; empty if the settings fix it."""
        if spans is not None:
            time_reductions(self._policy, spans)
        self._reference = self._make_reference(loaded)
        # After sharding, because the optimizer holds the shards, not the parameters as loaded.
        self._optimizer = make_optimizer(
            self._policy.parameters(),
            settings.trainer,
            device,
            seed=settings.seed,
            matrices=hidden_matrices(self._policy.lm),
        )
        self._progress = Progress()

    @staticmethod
    def rank_layout(settings: BackendSettings, num_ranks: int) -> RankLayout:
        """Rows over all ranks, or over groups that share them; weights over all of a copy."""
        return fsdp_layout(settings.trainer, num_ranks)

    def _make_reference(self, trained: ShardedPolicy) -> Reference | None:
        algorithm = self._settings.algorithm
        if algorithm is None or not algorithm.needs_reference:
            return None
        if self._settings.trainer.use_lora and self._settings.reference_model is None:
            return AdaptersAside(self._policy, self._computing)
        copy = load_reference(self._settings, self._device, trained, moved=self._spans.moved)
        return FrozenCopy(self._policy, copy)

    def accumulate_gradient(
        self, batches: Sequence[PackedBatch], *, version: int
    ) -> GradientResult:
        """Forward and backward over `batches`, one at a time."""
        losses = self._step_loss(version)
        with self._computing(), dropout_on(self._policy.lm):
            for number, batch in enumerate(batches):
                is_last = number == len(batches) - 1
                if isinstance(self._policy, FSDPModule):
                    # Copies of the model add up their gradients once, the ranks of one each time.
                    self._policy.set_requires_all_reduce(is_last)
                row = self._row(batch)
                with self._spans.span("forward", microbatch=number):
                    found = self._policy(row)
                    loss = losses.of_row(batch, row.trained_M, found)
                with self._spans.span("backward", microbatch=number):
                    loss.backward()
            # Once, because reading numbers waits for a GPU, which would have nothing to do then.
            losses.after_backward()
        with self._spans.span("metrics", on_cpu=True):
            if self._checkpointing is not None:
                losses.add_metrics(self._checkpointing.take_metrics())
                self._checkpointing.agree(gather_values(self._checkpointing.found))
            return losses.over_ranks(self._layout.speakers, facts=losses.facts)

    def _step_loss(self, version: int) -> StepLoss:
        records = self._settings.record_token_facts
        return StepLoss(self._loss, version=version, records_facts=records)

    def apply_gradient(self, scale: float = 1.0) -> UpdateResult:
        """Clip to `grad_clip` by the global norm; skip the step if the norm is not finite.

        The gradient is multiplied by `scale` first.
        """
        rate = scheduled_rate(self._settings, self._progress.step)
        set_learning_rate(self._optimizer, rate)
        with self._spans.span("gradient norm"):
            norm = self._clip(self._settings.trainer.grad_clip, scale)
        # The norm is the same on all ranks, so they skip together. One that stepped alone would
        # leave shards of different steps.
        is_skipped = not math.isfinite(norm)
        changed = None
        with self._spans.span("optimizer"):
            if not is_skipped:
                weights = RoundedWeights(
                    (local_part(parameter), local_part(parameter.grad))
                    for parameter in self._policy.parameters()
                    if parameter.grad is not None
                )
                self._optimizer.step()
                changed = weights.changed()
            self._optimizer.zero_grad()
        keeps_gradient = any(one.grad is not None for one in self._policy.parameters())
        # Skipped steps count, so the schedule ends with the run.
        self._progress = self._progress.after(is_skipped=is_skipped)
        self._progress.require_finite(norm)
        return UpdateResult(
            gradient_norm=norm,
            learning_rate=rate,
            is_skipped=is_skipped,
            changed=changed,
            keeps_gradient=keeps_gradient,
        )

    def rehearse_step(self) -> int:
        """Step at rate 0 and compare checksums; copies would take as much memory as the weights."""
        assert self._progress.step == 0, "a step was taken already"
        before = self._checksums()
        # At rate 0 AdamW multiplies weights by 1 - 0 * decay and adds 0, so no weight may change.
        set_learning_rate(self._optimizer, 0.0)
        self._clip(self._settings.trainer.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        # Otherwise the moments and the step count of the rehearsal would enter the first real step.
        self._optimizer.state.clear()
        changed = sum(old != new for old, new in zip(before, self._checksums(), strict=True))
        if self._checkpointing is not None:
            # Everything that a step needs besides activations has been in memory now.
            self.activations = limit_activations(
                self._checkpointing, self._settings.trainer, self._device
            )
        return max(gather_values(changed))

    def _checksums(self) -> list[int]:
        reshard(self._policy)
        return checksums(local_part(parameter) for parameter in self._policy.parameters())

    def _clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Multiply the gradient by `scale`, then cut its norm to at most `max_norm` (0 = any).

        Returns the norm before the cut.
        """
        # Shards of a copy do not overlap, so the square is the sum of theirs: one collective.
        gradients = [
            local_part(parameter.grad)
            for parameter in self._policy.parameters()
            if parameter.grad is not None
        ]
        assert gradients, "apply_gradient before accumulate_gradient"
        # In float32 or wider, as a norm in bfloat16 is off by up to 0.4 %. In float64 its square
        # cannot overflow. With offloaded gradients the norms are on the CPU, where NCCL cannot
        # reduce their sum.
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
        square = torch.stack(norms).double().square().sum().to(self._device)
        dist.all_reduce(square)
        # Over all ranks, so that all have the same bits; each copy of the model was counted.
        square /= self._layout.num_copies
        norm = scale * (math.sqrt(square.item()) if square.isfinite() else square.item())
        factor = scale
        if max_norm and math.isfinite(norm) and norm > max_norm:
            factor *= max_norm / norm
        if factor != 1.0:
            # In place on the local shards, which share memory with the gradients.
            torch._foreach_mul_(gradients, factor)
        return norm

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch; 0 where a token is not trained on."""
        with self._computing():
            return [
                self._timed_logprobs("logprobs", self._policy, batch, number)
                for number, batch in enumerate(batches)
            ]

    @torch.no_grad()
    def transformers_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return log-probs like `logprobs`, computed through the model's own head."""
        with self._computing():
            return [self._logprobs(self._policy, batch, by_transformers=True) for batch in batches]

    @torch.no_grad()
    def head_difference(self) -> float:
        """Compare log-probs of our head with those of transformers', both in float32."""
        with self._computing():
            return self._policy.head_difference()

    @torch.no_grad()
    def reference_logprobs(
        self, batches: Sequence[PackedBatch], *, by_transformers: bool = False
    ) -> list[NDArray[np.float32]]:
        """Return log-probs as `logprobs` does, under the reference model."""
        assert self._reference is not None, "these settings need no reference model"
        with self._reference.ready() as policy:
            if by_transformers:
                return [self._logprobs(policy, batch, by_transformers=True) for batch in batches]
            # The reference is a model of its own, which was not asked when tokens were sampled.
            return [
                self._timed_logprobs(
                    "reference logprobs", policy, replace(batch, routes_TLK=None), number
                )
                for number, batch in enumerate(batches)
            ]

    @torch.no_grad()
    def update_reference(self) -> None:
        """Copy this rank's shards of the current weights to the reference model."""
        assert self._reference is not None, "these settings need no reference model"
        self._reference.update()

    def _row(self, batch: PackedBatch, *, share: bool = True) -> PackedRow:
        trainer = self._settings.trainer
        require_known_tokens(batch.token_ids_T[: batch.num_tokens], self._policy.vocab_size)
        # Context parallelism cuts the row into slices of equal length, one per rank.
        multiple_of = math.lcm(trainer.pad_to_multiple_of, self._layout.context)
        return packed_row(batch, self._device, multiple_of=multiple_of, share=share)

    def _timed_logprobs(
        self, name: str, policy: PackedPolicy, batch: PackedBatch, number: int
    ) -> NDArray[np.float32]:
        with self._spans.span(name, microbatch=number):
            return self._logprobs(policy, batch)

    def _logprobs(
        self, policy: PackedPolicy, batch: PackedBatch, *, by_transformers: bool = False
    ) -> NDArray[np.float32]:
        # transformers' own attention knows no shared prefixes.
        row = self._row(batch, share=not by_transformers)
        # A compiled layer has a graph for each: with a gradient it is fused, and rounds, otherwise.
        # These log-probs are compared with those of the trained graph, so that graph is used.
        with torch.set_grad_enabled(self._settings.trainer.compile):
            found = policy(row, by_transformers=by_transformers).logprobs_M
        return in_batch(batch, row.trained_M, found.detach().cpu().numpy())

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one tensor at a time on every rank, with adapters merged in."""
        reshard(self._policy)
        for name, value in self._in_files(merged_weights(self._policy.lm, self._whole)):
            yield name, value.cpu()

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights; with LoRA only adapted blocks or adapters: servers have the rest."""
        reshard(self._policy)
        return self._transferred(self._whole)

    def transfer_headers(self) -> Sequence[TensorHeader]:
        """Describe the tensors of `transfer_weights`; nothing is gathered or computed."""
        return [TensorHeader.from_tensor(*one) for one in self._transferred(without_content)]

    def without_gradient_buffers(self) -> AbstractContextManager[None]:
        """Do nothing: gradients are freed after each step."""
        return nullcontext()

    def _transferred(
        self, whole: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        settings, lm = self._settings, self._policy.lm
        dtype = torch_dtype(settings.compute_dtype)
        if settings.sends_adapter:
            return scaled_adapter(lm, whole)
        if settings.trainer.use_lora:
            return merged_blocks(lm, whole, dtype)
        # Rounded before they are gathered, which is half of the bytes: servers would round them in
        # the same way.
        return self._in_files(merged_weights(lm, lambda value: whole(value.to(dtype))))

    def _in_files(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters under their names in model files, with experts apart."""
        for name, value in weights:
            yield from as_in_files(name, value, self._policy.lm.config.model_type)

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        return whole(value, self._device)

    def export_gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the accumulated gradient, named like `export_weights`; for checks."""
        reshard(self._policy)
        for name, parameter in self._policy.lm.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                yield name, self._whole(parameter.grad).cpu()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimizer, progress and random state."""
        save_state(folder, self._training_state())

    def start_checkpoint(self, folder: str | Path, *, with_training_state: bool) -> Saving:
        """Copy the state, or only the weights, to CPU memory and write it in the background."""
        state = self._training_state()
        return start_saving(folder, state if with_training_state else {"model": state["model"]})

    def _training_state(self) -> dict[str, Any]:
        reshard(self._policy)
        state = fsdp_state.training_state(self._policy, self._optimizer, self._progress)
        # An unmoved reference is the initial model, which a resumed run loads again anyway.
        if self._reference is not None and self._reference.has_moved:
            state["reference"] = self._reference.state()
        return state

    def load_checkpoint(self, folder: str | Path) -> None:
        """Restore weights, optimizer, progress, random state and reference from `folder`."""
        reshard(self._policy)
        self._progress = fsdp_state.load(folder, self._policy, self._optimizer)
        if self._reference is not None:
            load_moved(folder, self._reference)

    def save_pretrained(self, folder: str | Path) -> None:
        """Gather the weights on rank 0 and write them with config and tokenizer.

        With LoRA they are merged, and the folder `adapter` holds the adapter alone.
        """
        # The condition is inside the loops, because every rank must take part in gathering. Cloned,
        # because a value that is on the CPU already may share memory with its parameter.
        lm, is_writer = self._policy.lm, dist.get_rank() == 0
        reshard(self._policy)
        weights = {
            name: value.cpu().clone()
            for name, value in merged_weights(lm, self._whole)
            if is_writer
        }
        adapter = {
            name: value.cpu() for name, value in adapter_weights(lm, self._whole) if is_writer
        }
        fsdp_state.export(folder, lm, weights, self._settings.model, adapter=adapter)


class ActivationRoom(NamedTuple):
    """The memory that is left for activations, and a reason for people."""

    num_bytes: float
    reason: str


def limit_activations(
    checkpointing: AdaptiveCheckpointing, trainer: TrainerSection, device: torch.device
) -> str:
    """Limit the memory for backward passes to the room of the rank that has least.

    Returns a sentence that says how much that is, and why. Every rank calls this, when weights,
    gradients and moments have been in memory at the same time.
    """
    every = gather_values(_room(trainer, device))
    least = min(every)
    checkpointing.limit(least.num_bytes)
    return (
        "as few layers are recomputed as memory needs: a row may keep "
        f"{max(0.0, least.num_bytes) / GIB:.2f} GiB ({least.reason})"
    )


def _room(trainer: TrainerSection, device: torch.device) -> ActivationRoom:
    if trainer.activation_memory_gib is not None:
        return ActivationRoom(trainer.activation_memory_gib * GIB, "activation_memory_gib")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        may_take = torch.cuda.get_per_process_memory_fraction(device) * total
        own = min(free + torch.cuda.memory_reserved(device), may_take)
        used = torch.cuda.max_memory_allocated(device)
        left = own - used - LOGITS_BYTES - LEFT_SHARE * total
        return ActivationRoom(
            left, f"what weights, gradients and moments leave of {own / GIB:.1f} GiB"
        )
    free = _free_bytes()
    # As if all ranks were on this machine, because those of others do not say how many they are.
    num_ranks = torch.distributed.get_world_size()
    share = CPU_SHARE * free / num_ranks
    return ActivationRoom(
        share, f"half of {free / GIB:.1f} GiB of free memory, divided by {num_ranks}"
    )


def _free_bytes() -> int:
    """Return the free memory of this machine, or of the container if that is less."""
    free = psutil.virtual_memory().available
    try:
        allowed = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if allowed == "max" else max(0, min(free, int(allowed) - used))
