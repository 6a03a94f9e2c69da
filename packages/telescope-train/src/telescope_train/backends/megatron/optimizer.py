"""The library's data-parallel wrapper and optimizer, behind the backend protocol.

Gradients are summed over batches and ranks and never divided. The global norm is taken before
anything is clipped, so that a gradient that is not finite leaves no trace.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from telescope_train.backends.protocol import BackendSettings
from telescope_train.models.load import torch_dtype

_LOW_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.uint8}
_WIDE = dict.fromkeys(("main_grads", "main_params", "exp_avg", "exp_avg_sq"), "float32")


def buffers_config(settings: BackendSettings) -> Any:
    """Return the library's DistributedDataParallelConfig."""
    from megatron.core.distributed import DistributedDataParallelConfig

    section = settings.megatron
    is_low = torch_dtype(settings.compute_dtype) == torch.bfloat16
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=section.megatron_grad_reduce_in_fp32 and is_low,
        overlap_grad_reduce=section.megatron_overlap_grad_reduce,
        use_distributed_optimizer=section.megatron_use_distributed_optimizer,
        average_in_collective=False,
    )


def wrap(settings: BackendSettings, config: Any, model: Any) -> Any:
    """Return the model with buffers for its gradients, which ranks sum."""
    from megatron.core.distributed import DistributedDataParallel

    wrapped: Any = DistributedDataParallel(config, buffers_config(settings), model)
    config.no_sync_func = wrapped.no_sync
    return wrapped


def optimizer_config(settings: BackendSettings) -> Any:
    """Return the library's OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig

    trainer, section = settings.trainer, settings.megatron
    dtype = torch_dtype(settings.compute_dtype)
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": trainer.learning_rate,
        "weight_decay": trainer.weight_decay,
        "adam_beta1": trainer.adam_betas[0],
        "adam_beta2": trainer.adam_betas[1],
        "adam_eps": trainer.adam_eps,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        # Clipped by `Stepper`, which has to see the norm first.
        "clip_grad": 0.0,
        "use_distributed_optimizer": section.megatron_use_distributed_optimizer,
    }
    dtypes = section.megatron_optimizer_dtypes
    if section.megatron_optimizer_cpu_offload:
        # Only as a precision-aware one does it keep the wide weights in CPU memory with the rest,
        # and find them again when it loads its state.
        dtypes = dtypes or _WIDE
        values |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": section.megatron_optimizer_offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "use_torch_optimizer_for_cpu_offload": True,
        }
    if dtypes is not None:
        values |= precision_values(dtypes)
    return OptimizerConfig(**values)


def precision_values(dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a precision-aware optimizer.

    It is Transformer Engine's, or works in CPU memory.
    """

    def dtype(name: str) -> torch.dtype:
        return _LOW_DTYPES.get(dtypes[name], torch.float32)

    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": dtype("main_grads"),
        "main_params_dtype": dtype("main_params"),
        "exp_avg_dtype": dtype("exp_avg"),
        "exp_avg_sq_dtype": dtype("exp_avg_sq"),
    }


class Stepper:
    """The gradient of one wrapped model, and the optimizer that applies it."""

    def __init__(self, settings: BackendSettings, wrapped: Any) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        self._wrapped = wrapped
        trainer = settings.trainer
        self._weight_decay = trainer.weight_decay
        self._of_adam = {"betas": trainer.adam_betas, "eps": trainer.adam_eps}
        # A copy of the state in CPU groups is not needed: checkpoints gather it as it is.
        self.optimizer: Any = get_megatron_optimizer(optimizer_config(settings), [wrapped])
        self._has_gradient = self._is_summed = False
        self._aside: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Clear the gradient."""
        # Both: the optimizer's gradients are views of the buffers that the wrapper clears.
        self.optimizer.zero_grad()
        self._wrapped.zero_grad_buffer()
        self._has_gradient = self._is_summed = False
        self._aside = []

    def before_backward(self) -> None:
        """Prepare for a pass that adds to the gradient."""
        if self._is_summed:
            # Gradients already summed over ranks must not be summed again with the new ones.
            self._aside = [gradient.clone() for gradient in self._gradients()]
            self._wrapped.zero_grad_buffer()
            self._is_summed = False

    def after_backward(self) -> None:
        """Record that there is a gradient; one that was reduced meanwhile is complete."""
        self._has_gradient = True
        if self._wrapped.ddp_config.overlap_grad_reduce:
            # The buckets are on their way, and only this pass knows them.
            self.sum_over_ranks()

    def sum_over_ranks(self) -> None:
        """Sum the gradient over the ranks that hold the same parameters, if not done yet."""
        from megatron.core.distributed import finalize_model_grads

        assert self._has_gradient, "apply_gradient before accumulate_gradient"
        if not self._is_summed:
            finalize_model_grads([self._wrapped], None)
            self._is_summed = True
        for gradient, old in zip(self._gradients(), self._aside, strict=bool(self._aside)):
            gradient.add_(old)
        self._aside = []

    def _gradients(self) -> list[Tensor]:
        buffers = [*self._wrapped.buffers, *self._wrapped.expert_parallel_buffers]
        return [buffer.grad_data for buffer in buffers]

    def clip(self, max_norm: float, scale: float) -> float:
        """Multiply the gradient by `scale`, then cut its norm to at most `max_norm` (0 = any).

        Returns the norm before the cut. The optimizer has the gradient afterwards.
        """
        if scale != 1.0:
            self._multiply(scale)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if max_norm and math.isfinite(norm) and norm > max_norm:
            self._multiply(max_norm / norm)
            self.optimizer.prepare_grads()
        return norm

    def _multiply(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    def step(self, rate: float) -> None:
        """Take a step at learning rate `rate` with the gradient that `clip` has prepared."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            # The library leaves this to its own scheduler: norms and biases have none.
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()

    def forget_steps(self) -> None:
        """Reset the optimizer to its state before the first step."""
        for inner in self.inner_optimizers():
            inner.state.clear()
            for group in inner.param_groups:
                # Transformer Engine's Adam counts steps here, torch's does not.
                if "step" in group:
                    del group["step"]

    def make_state(self) -> None:
        """Create the optimizer's state if there is none, as a target for loading."""
        if self.num_state_values():
            return
        # By a step at rate 0 without gradient; its count of steps is overwritten as well.
        self.clear()
        self.optimizer.prepare_grads()
        self.step(0.0)
        self.clear()

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state that the library has read, without the settings of the earlier run."""
        self.optimizer.load_state_dict(state)
        for inner in self.inner_optimizers():
            for group in inner.param_groups:
                group.update(self._of_adam)
            for values in inner.state.values():
                # The distributed optimizer gives all parameters one and the same count of steps,
                # and torch's AdamW would add one to it for each of them.
                if torch.is_tensor(values.get("step")):
                    values["step"] = values["step"].clone()

    def inner_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizers that hold the state, those of an offloading one included."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for one in chained:
            inner = one.optimizer
            if inner is None:
                continue
            yield inner
            yield from getattr(inner, "sub_optimizers", ())

    def num_state_values(self) -> int:
        """Return the number of optimizer state values on this rank."""
        return sum(
            value.numel()
            for inner in self.inner_optimizers()
            for state in inner.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.numel() > 1
        )

    def whole_gradient(self) -> dict[str, Tensor]:
        """Return this rank's gradient by parameter, with the parts that other ranks have summed."""
        self.sum_over_ranks()
        if self._wrapped.ddp_config.use_distributed_optimizer:
            self._gather_summed()
        return {name: value.main_grad for name, value in self._wrapped.module.named_parameters()}

    def _gather_summed(self) -> None:
        for group in (
            *self._wrapped.bucket_groups,
            *self._wrapped.expert_parallel_bucket_groups,
        ):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                pieces = [torch.empty_like(own) for _ in range(ranks.size())]
                dist.all_gather(pieces, own, group=ranks)
                bucket.grad_data.copy_(torch.cat(pieces))
