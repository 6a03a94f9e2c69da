"""The optimizers of `trainer.optimizer`: AdamW with moments of 32, 16 or 8 bits, or on the CPU.

Weights keep their own dtype (`model_dtype`) in all of them. Weight decay applies to matrices only,
not to norms and biases, as is usual for transformers.
"""

from collections.abc import Iterable
from typing import Any

import torch

from telescope_core.base.errors import ConfigError
from telescope_train.backends.fsdp.low_precision_adamw import LowPrecisionAdamW
from telescope_train.backends.fsdp.offloaded_adamw import OffloadedAdamW
from telescope_train.config.trainer_section import TrainerSection

_AO_HINT = (
    'optimizer "adamw_8bit" needs torchao; install telescope-train[low-bit-optimizers], '
    'or use "adamw" or "adamw_bf16"'
)


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], trainer: TrainerSection, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of those of `parameters` that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": trainer.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # With LoRA only matrices are trained, so the group of vectors can be empty.
    groups = [group for group in groups if group["params"]]
    arguments: dict[str, Any] = {
        "lr": trainer.learning_rate,
        "betas": trainer.adam_betas,
        "eps": trainer.adam_eps,
    }
    if trainer.optimizer_cpu_offload:
        return OffloadedAdamW(groups, **arguments)
    if trainer.optimizer == "adamw_bf16":
        return LowPrecisionAdamW(groups, **arguments)
    if trainer.optimizer == "adamw_8bit":
        return _adamw_8bit(device)(groups, **arguments)
    return torch.optim.AdamW(groups, fused=True, **arguments)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    # torchao keeps the rate in a tensor, because its step is compiled and would be compiled again
    # for every new number. So the tensor is filled, not replaced.
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _adamw_8bit(device: torch.device) -> type[torch.optim.Optimizer]:
    if device.type != "cuda":
        raise ConfigError(
            'optimizer "adamw_8bit" compiles its step for a GPU and there is none here; '
            'use "adamw" or "adamw_bf16"'
        )
    return load_adamw_8bit()


def load_adamw_8bit() -> type[torch.optim.Optimizer]:
    """Return torchao's AdamW8bit, prepared for checkpoints; ConfigError if not installed."""
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ConfigError(_AO_HINT) from error

    # A checkpoint is staged through copies in CPU memory. They need these two operations, which
    # torchao's moments lack.
    @OptimState8bit.implements([torch.ops.aten.clone.default])
    def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        moment = args[0]
        copies = (part.clone() for part in (moment.codes, moment.scale, moment.qmap))
        return OptimState8bit(*copies, moment.signed, dtype=moment.dtype)

    @OptimState8bit.implements([torch.ops.aten.zeros_like.default])
    def _zeros_like(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        moment, device = args[0], kwargs.get("device") or args[0].device
        empty = (torch.zeros_like(part, device=device) for part in (moment.codes, moment.scale))
        return OptimState8bit(*empty, moment.qmap.to(device), moment.signed, dtype=moment.dtype)

    return AdamW8bit
