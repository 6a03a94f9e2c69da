"""Backend `megatron`: megatron-core shares layers, matrices, tokens and experts over the ranks.

Layers compute in `mixed_precision_dtype`; in bfloat16 the optimizer keeps weights in float32
beside them. Gradients are summed over micro-batches and ranks and never divided, because the token
weights already contain the only denominator. Dims: T tokens of a row, M trained tokens.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.backends.distributed_checkpoint import Saving
from telescope_train.backends.fsdp.sharding import gather_values
from telescope_train.backends.megatron import checkpoint
from telescope_train.backends.megatron.layout import megatron_layout
from telescope_train.backends.megatron.library import using
from telescope_train.backends.megatron.loading import Loaded, build, row_multiple, save_model
from telescope_train.backends.megatron.mapping import hugging_face_shapes
from telescope_train.backends.megatron.model import run_rows, share_results
from telescope_train.backends.megatron.optimizer import Stepper, wrap
from telescope_train.backends.megatron.rows import RankRow, rank_row
from telescope_train.backends.megatron.weights import RankWeights
from telescope_train.backends.megatron.whole_model import StreamedModel
from telescope_train.backends.progress import Progress, checksums, scheduled_rate
from telescope_train.backends.protocol import BackendSettings
from telescope_train.backends.step_loss import StepLoss, in_batch
from telescope_train.backends.trainer_backend import GradientResult, Loss, UpdateResult
from telescope_train.backends.transfer import TensorHeader
from telescope_train.batches.batch import PackedBatch
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.head_check import head_difference
from telescope_train.models.logprobs import Head
from telescope_train.models.packed import TrainedLogprobs
from telescope_train.models.row import packed_row, require_known_tokens
from telescope_train.observability.spans import SilentRecorder, SpanRecorder


class MegatronBackend:
    """One rank of the model; see `TrainerBackend`."""

    @staticmethod
    def rank_layout(settings: BackendSettings, num_ranks: int) -> RankLayout:
        """Return how `num_ranks` ranks divide the work; ConfigError if they cannot."""
        return megatron_layout(settings.megatron, num_ranks)

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
        with using(device):
            self._loaded: Loaded = build(settings, device, moved=self._spans.moved)
            self.attention = self._loaded.attention
            self.sharing = self._loaded.sharing
            self._weights: RankWeights = self._loaded.weights
            self._wrapped = wrap(settings, self._loaded.config, self._weights.model)
            self._stepper = Stepper(settings, self._wrapped)
        self._streamed = StreamedModel(self._loaded.empty, device, self._loaded.dtype)
        self._progress = Progress()
        self._has_moved_reference = False

    def accumulate_gradient(
        self, batches: Sequence[PackedBatch], *, version: int
    ) -> GradientResult:
        """Forward and backward over `batches`, through all pipeline stages."""
        records = self._settings.record_token_facts
        losses = StepLoss(self._loss, version=version, records_facts=records)
        batches = list(batches)
        rows = [self._row(batch) for batch in batches]

        def use(number: int, found: TrainedLogprobs) -> torch.Tensor:
            return losses.of_row(batches[number], rows[number].trained_M, found)

        self._stepper.before_backward()
        with using(self._device), self._spans.span("forward and backward"):
            run_rows(self._wrapped, rows, use, backward=True)
            self._stepper.after_backward()
        losses.after_backward()
        with using(self._device):
            facts = share_results(losses.facts)
        with self._spans.span("metrics", on_cpu=True):
            return losses.over_ranks(self._loaded.layout.speakers, facts=facts)

    def apply_gradient(self, scale: float = 1.0) -> UpdateResult:
        """Clip to `grad_clip` by the global norm; skip the step if the norm is not finite.

        The gradient is multiplied by `scale` first.
        """
        rate = scheduled_rate(self._settings, self._progress.step)
        norm = self._norm(scale)
        # The norm is the same on all ranks, so they skip together.
        is_skipped = not math.isfinite(norm)
        with using(self._device), self._spans.span("optimizer"):
            if not is_skipped:
                self._stepper.step(rate)
            self._stepper.clear()
        # Skipped steps count, so the schedule ends with the run.
        self._progress = self._progress.after(is_skipped=is_skipped)
        self._progress.require_finite(norm)
        return UpdateResult(gradient_norm=norm, learning_rate=rate, is_skipped=is_skipped)

    def _norm(self, scale: float) -> float:
        with using(self._device):
            with self._spans.span("gradient reduction"):
                self._stepper.sum_over_ranks()
            with self._spans.span("gradient norm"):
                return self._stepper.clip(self._settings.trainer.grad_clip, scale)

    def rehearse_step(self) -> int:
        """Step at rate 0 and compare checksums; copies would take as much memory as the weights."""
        assert self._progress.step == 0, "a step was taken already"
        before = checksums(self._weights.parameters.values())
        self._norm(1.0)
        with using(self._device):
            self._stepper.step(0.0)
            self._stepper.forget_steps()
            self._stepper.clear()
        after = checksums(self._weights.parameters.values())
        changed = sum(old != new for old, new in zip(before, after, strict=True))
        return max(gather_values(changed))

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T [T], nats, of each batch; 0 where a token is not trained on."""
        return self._logprobs("logprobs", self._weights.model, batches)

    def reference_logprobs(
        self, batches: Sequence[PackedBatch], *, by_transformers: bool = False
    ) -> list[NDArray[np.float32]]:
        """Return log-probs as `logprobs` does, under the reference model."""
        if by_transformers:
            empty = self._loaded.reference_empty
            streamed = StreamedModel(empty, self._device, self._loaded.dtype)
            return self._transformers_logprobs(streamed, self._reference, batches)
        return self._logprobs("reference logprobs", self._reference.model, batches)

    @property
    def _reference(self) -> RankWeights:
        assert self._loaded.reference is not None, "these settings need no reference model"
        return self._loaded.reference

    def update_reference(self) -> None:
        """Copy this rank's part of the current weights to the reference model."""
        reference = self._reference
        with torch.no_grad():
            for name, value in self._weights.parameters.items():
                reference.parameters[name].copy_(value)
        self._has_moved_reference = True

    @torch.no_grad()
    def _logprobs(
        self, name: str, model: Any, batches: Sequence[PackedBatch]
    ) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = []
        batches = list(batches)
        rows = [self._row(batch) for batch in batches]

        def use(number: int, logprobs: TrainedLogprobs) -> torch.Tensor:
            values = logprobs.logprobs_M.float().cpu().numpy()
            found.append(in_batch(batches[number], rows[number].trained_M, values))
            return logprobs.logprobs_M.sum()

        with using(self._device), self._spans.span(name):
            run_rows(model, rows, use, backward=False)
            return share_results(found)

    @torch.no_grad()
    def transformers_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return log-probs like `logprobs`, by transformers' layers with exported weights."""
        return self._transformers_logprobs(self._streamed, self._weights, batches)

    def _transformers_logprobs(
        self, streamed: StreamedModel, weights: RankWeights, batches: Sequence[PackedBatch]
    ) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = []
        for batch in batches:
            row = packed_row(batch, self._device, share=False)
            values = streamed.logprobs(row, weights.export())
            found.append(in_batch(batch, row.trained_M, values.cpu().numpy()))
        return found

    def head_difference(self) -> float:
        """Compare log-probs of a head like ours with those of transformers', both in float32."""
        arch = self._loaded.architecture
        # No rank has the whole head; the arithmetic beside its matrix is that of any other.
        weight_VH = torch.linspace(-2.0, 3.0, 64 * arch.hidden_size).sin().view(64, -1)
        return head_difference(
            self._loaded.empty, Head(weight_VH, 0, 64, None, rule=arch.head_rule)
        )

    def _row(self, batch: PackedBatch) -> RankRow:
        context, rank = self._loaded.layout.context, self._loaded.context_rank
        vocab_size = self._loaded.architecture.vocab_size
        require_known_tokens(batch.token_ids_T[: batch.num_tokens], vocab_size)
        return rank_row(
            batch,
            self._device,
            ranks=context,
            rank=rank,
            multiple_of=row_multiple(self._settings, self._loaded.layout),
            engine_attends=self._settings.megatron.megatron_use_transformer_engine,
        )

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one tensor at a time on every rank."""
        for name, value in self._weights.export():
            yield name, value.cpu()

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, where the ranks communicate."""
        return self._weights.export()

    def transfer_headers(self) -> list[TensorHeader]:
        """Describe the tensors of `transfer_weights`; nothing is gathered."""
        dtype = str(self._loaded.dtype).removeprefix("torch.")
        shapes = hugging_face_shapes(self._loaded.architecture)
        return [TensorHeader(name=n, dtype=dtype, shape=shape) for n, shape in shapes.items()]

    @contextmanager
    def without_gradient_buffers(self) -> Iterator[None]:
        """Free the memory of gradients inside the block."""
        with using(self._device):
            self._stepper.clear()
            self._wrapped.offload_grad_buffers()
        try:
            yield
        finally:
            with using(self._device):
                self._wrapped.restore_grad_buffers()
                self._stepper.clear()

    def export_gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the accumulated gradient, named like `export_weights`; for checks."""
        with using(self._device):
            own = self._stepper.whole_gradient()
        by_parameter = {
            id(parameter): own[name] for name, parameter in self._weights.model.named_parameters()
        }
        values = {
            name: by_parameter[id(parameter)]
            for name, parameter in self._weights.parameters.items()
        }
        for name, value in self._weights.export(values):
            yield name, value.cpu()

    def num_state_values(self) -> int:
        """Return the number of optimizer state values on this rank; for checks."""
        return self._stepper.num_state_values()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimizer, progress and random state."""
        checkpoint.save(Path(folder), self._trained(), self._progress, device=self._device)

    def start_checkpoint(self, folder: str | Path, *, with_training_state: bool) -> Saving:
        """Copy the state, or only the weights, to CPU memory and write it in the background."""
        return checkpoint.start(
            Path(folder),
            self._trained(),
            self._progress,
            device=self._device,
            with_training_state=with_training_state,
        )

    def _trained(self, *, with_reference: bool | None = None) -> checkpoint.Trained:
        # An unmoved reference is the initial model, which a resumed run loads again anyway.
        is_moved = self._has_moved_reference if with_reference is None else with_reference
        return checkpoint.Trained(
            model=self._weights.model,
            stepper=self._stepper,
            reference=self._reference.model if is_moved else None,
            is_distributed=self._settings.megatron.megatron_use_distributed_optimizer,
        )

    def load_checkpoint(self, folder: str | Path) -> None:
        """Restore weights, optimizer, progress, random state and reference from `folder`."""
        is_moved = self._loaded.reference is not None and checkpoint.has_reference(Path(folder))
        with using(self._device):
            trained = self._trained(with_reference=is_moved)
            self._progress = checkpoint.read(Path(folder), trained)
        self._has_moved_reference = is_moved

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config and tokenizer in Hugging Face format; rank 0 writes."""
        save_model(Path(folder), self._settings, self._loaded, self.export_weights())
