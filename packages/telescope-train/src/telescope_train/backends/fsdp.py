"""Backend `fsdp`: torch FSDP2, one model over data-parallel ranks; gloo on CPU, NCCL on CUDA.

Master weights stay in `model_dtype`; `mixed_precision_dtype` is what layers compute in. Gradients
are summed over micro-batches and ranks, never averaged: the weights of the tokens already hold
the only denominator. Dims: T tokens of a row, M trained tokens.
"""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from telescope_core.errors import ConfigError, TelescopeError
from telescope_train.algorithms.terms import TokenLoss, shared_metrics
from telescope_train.backends import fsdp_state
from telescope_train.backends.loss_inputs import loss_inputs
from telescope_train.backends.protocol import (
    BackendSettings,
    GradientResult,
    Loss,
    UpdateResult,
)
from telescope_train.backends.schedule import learning_rate_factor
from telescope_train.batch import PackedBatch
from telescope_train.metrics import MetricSum, reduce_metrics
from telescope_train.models.attention import PACKED_ATTENTION, register_packed_attention
from telescope_train.models.load import load_model, torch_dtype
from telescope_train.models.norms import replace_rms_norms
from telescope_train.models.packed import PackedPolicy, packed_row

MAX_SKIPPED_IN_A_ROW = 5


class FsdpBackend:
    """One rank; see `TrainerBackend`."""

    def __init__(self, settings: BackendSettings, loss: Loss, device: torch.device) -> None:
        self._settings = settings
        self._loss = loss
        self._device = device
        compute_dtype = _compute_dtype(settings, device)
        loaded = load_model(
            settings.model.model,
            dtype=settings.model.model_dtype,
            trust_remote_code=settings.model.trust_remote_code,
        )
        _choose_attention(loaded.model, device, compute_dtype)
        if device.type == "cpu" and compute_dtype == torch.float32:
            replace_rms_norms(loaded.model)
        self._policy = PackedPolicy(
            loaded.model,
            chunk_size=settings.trainer.entropy_chunk_size,
            vocab_size=loaded.vocab_size,
        ).eval()
        _shard(self._policy, device, compute_dtype)
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=settings.trainer.learning_rate,
            betas=settings.trainer.adam_betas,
            eps=settings.trainer.adam_eps,
            weight_decay=settings.trainer.weight_decay,
            foreach=True,
        )
        self._progress = fsdp_state.Progress()

    def accumulate_gradient(
        self, batches: Sequence[PackedBatch], *, version: int
    ) -> GradientResult:
        """Forward and backward over `batches`, one at a time."""
        total, parts = 0.0, []
        for batch in batches:
            loss, metrics = self._accumulate_one(batch, version)
            total += loss
            parts.append(metrics)
        per_rank = _gather((total, reduce_metrics(parts)))
        return GradientResult(
            loss=sum(loss for loss, _ in per_rank),
            metrics=reduce_metrics(metrics for _, metrics in per_rank),
        )

    def _accumulate_one(
        self, batch: PackedBatch, version: int
    ) -> tuple[float, dict[str, MetricSum]]:
        row = packed_row(batch, self._device)
        logprobs_M, entropy_M = self._policy(row)
        terms, weights_M, same_version_M = loss_inputs(
            batch, row.trained_M.cpu().numpy(), logprobs_M, entropy_M, version=version
        )
        token_loss: TokenLoss = self._loss(terms)
        loss = (token_loss.loss_T * weights_M).sum()
        loss.backward()
        shared = shared_metrics(terms, same_version_T=same_version_M)
        return loss.item(), {**token_loss.metrics, **shared}

    def apply_gradient(self) -> UpdateResult:
        """Clip to `grad_clip` by the global norm; a norm that is not finite skips the step."""
        trainer = self._settings.trainer
        factor = learning_rate_factor(
            self._progress.step,
            trainer.lr_scheduler,
            warmup_steps=trainer.warmup_steps,
            number_of_steps=self._settings.number_of_steps,
            min_lr_ratio=trainer.min_lr_ratio,
        )
        rate = trainer.learning_rate * factor
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._clip(trainer.grad_clip)
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._progress = self._progress.after(is_skipped=is_skipped)
        if self._progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TelescopeError(
                f"the gradient norm was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row "
                f"(now {norm}); lower learning_rate, or look at the last batch's log-probs"
            )
        return UpdateResult(gradient_norm=norm, learning_rate=rate, is_skipped=is_skipped)

    def _clip(self, max_norm: float) -> float:
        """Scale the gradient to a norm of at most `max_norm`, if not 0; returns what it was."""
        gradients = [
            parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            for parameter in self._policy.parameters()
            if parameter.grad is not None
        ]
        assert gradients, "apply_gradient before accumulate_gradient"
        square = torch.nn.utils.get_total_norm(gradients).double() ** 2
        dist.all_reduce(square)
        norm = math.sqrt(square.item()) if square.isfinite() else square.item()
        if max_norm and math.isfinite(norm) and norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / norm)
        return norm

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Forward over `batches`, without a gradient."""
        return [self._logprobs(batch, by_transformers=False) for batch in batches]

    @torch.no_grad()
    def transformers_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Forward through the model's own head."""
        return [self._logprobs(batch, by_transformers=True) for batch in batches]

    def _logprobs(self, batch: PackedBatch, *, by_transformers: bool) -> NDArray[np.float32]:
        row = packed_row(batch, self._device)
        found = self._policy(row, by_transformers=by_transformers).logprobs_M.cpu().numpy()
        logprobs_T = np.zeros(len(batch.token_ids_T), dtype=np.float32)
        logprobs_T[row.trained_M.cpu().numpy()] = found
        logprobs_T[~batch.mask_T] = 0.0
        return logprobs_T

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one tensor at a time; every rank receives it."""
        for name, parameter in self._policy.lm.named_parameters():
            yield name, _whole(parameter.detach())

    def export_gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather what `accumulate_gradient` left, in the shape of `export_weights`; for checks."""
        for name, parameter in self._policy.lm.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            yield name, _whole(parameter.grad)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimiser, progress and random state."""
        fsdp_state.save(folder, self._policy, self._optimizer, self._progress)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Take them back."""
        self._progress = fsdp_state.load(folder, self._policy, self._optimizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Gather the weights on rank 0 and write them with config and tokenizer."""
        weights = {
            name: value.clone() for name, value in self.export_weights() if dist.get_rank() == 0
        }
        fsdp_state.export(folder, self._policy.lm, weights, self._settings.model)


def _compute_dtype(settings: BackendSettings, device: torch.device) -> torch.dtype:
    name = settings.model.mixed_precision_dtype
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch_dtype(name)


def _choose_attention(lm: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Pick the fastest attention that keeps packed sequences apart.

    transformers' own SDPA path builds a [T, T] mask; it serves only layers with sliding windows,
    which the others do not know.
    """
    config = lm.config.get_text_config()
    has_windows = any("sliding" in kind for kind in getattr(config, "layer_types", None) or ())
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and importlib.util.find_spec("flash_attn") is not None:
        lm.set_attn_implementation("flash_attention_2")
    elif has_windows or not lm._can_set_attn_implementation():
        lm.set_attn_implementation("sdpa")
    else:
        register_packed_attention()
        lm.set_attn_implementation(PACKED_ATTENTION)


def _shard(policy: PackedPolicy, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard every decoder layer, then what is left (embeddings, norm, head) as the root."""
    layers = getattr(policy.lm.base_model, "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(policy.lm).__name__} has no list of decoder layers called `layers`; "
            "train_backend fsdp knows Llama, Qwen, Mistral and models built like them"
        )
    precision = MixedPrecisionPolicy()
    if any(parameter.dtype != compute_dtype for parameter in policy.parameters()):
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    arguments = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": precision,
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=dist.get_world_size() > 1, **arguments)
    fully_shard(policy, **arguments)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _gather(value: object) -> list:
    """Return the plain value of every rank, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
