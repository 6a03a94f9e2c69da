"""The optimizers of `trainer.optimizer`: AdamW with moments of 32, 16 or 8 bits, or on the CPU.

Muon, whose other half is AdamW, has a module of its own.

Weights keep their own dtype (`model_dtype`) in all of them. Weight decay applies to matrices only,
not to norms and biases, as is usual for transformers. Paper: arXiv:1711.05101, algorithm 2.
Deviation: where moments are kept, and their dtype.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from telescope_core.base.errors import ConfigError
from telescope_train.backends.fsdp.muon import Muon
from telescope_train.backends.fsdp.sharding import local_part, shard_place
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.rounding import round_at_random

_AO_HINT = (
    'optimizer "adamw_8bit" needs torchao; install telescope-train[low-bit-optimizers], '
    'or use "adamw" or "adamw_bf16"'
)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    trainer: TrainerSection,
    device: torch.device,
    *,
    seed: int,
    matrices: Mapping[torch.nn.Parameter, tuple[int, ...]] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of those of `parameters` that are trained.

    `seed` is the same on all ranks; what rounds at random draws from it. `matrices`: those that
    Muon is for, with the rows of the matrices that are fused in each.
    """
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
    if trainer.optimizer == "muon":
        momentum = trainer.muon_momentum
        return Muon(groups, matrices or {}, momentum=momentum, device=device, **arguments)
    if trainer.optimizer == "adamw_bf16":
        return LowPrecisionAdamW(groups, seed=seed, **arguments)
    if trainer.optimizer == "adamw_8bit":
        return _adamw_8bit(device)(groups, **arguments)
    return torch.optim.AdamW(groups, fused=True, **arguments)


class ShardAdamW(torch.optim.Optimizer):
    """AdamW over shards, parameter by parameter; subclasses define the update and the moments."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an earlier optimizer, parameter by parameter.

        torch itself would give all moments the dtype and device of the weights at first: for a
        moment, a GPU would hold everything that is kept elsewhere because it has no room there.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (one for group in self.param_groups for one in group["params"])
        for number, parameter in zip(saved, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    name: self.kept(value, parameter) if name in _MOMENTS else value
                    for name, value in state_dict["state"][number].items()
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        assert closure is None, "gradients are accumulated before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = self.first_moment(parameter)
                    state["exp_avg_sq"] = self.first_moment(parameter)
                state["step"] += 1
                self.update(parameter, state, group)

    @abstractmethod
    def kept(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Return a moment of `parameter` in the form in which it is kept between steps."""

    @abstractmethod
    def first_moment(self, parameter: Tensor) -> Tensor:
        """Return the moment before the first step: zeros in the form that is kept."""

    @abstractmethod
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update this rank's shard of `parameter` and its moments; `step` includes this one."""


class OffloadedAdamW(ShardAdamW):
    """Moments stay in CPU memory, where the step is computed too: torch's fused AdamW, to the bit.

    Weights and gradients stay where they are. For a step, each parameter's shard and gradient are
    copied to the CPU, one after the other, and the new values back. This moves 12 bytes per float32
    parameter and step, and saves 8 bytes of GPU memory per parameter.
    """

    def kept(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Return the moment in CPU memory."""
        return moment.to("cpu", parameter.dtype)

    def first_moment(self, parameter: Tensor) -> Tensor:
        """Return zeros in CPU memory."""
        return torch.zeros_like(parameter, device="cpu")

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one shard."""
        beta1, beta2 = group["betas"]
        weights = local_part(parameter)
        # On a CPU these are the shards themselves.
        on_cpu, gradient = weights.cpu(), local_part(parameter.grad).cpu()
        torch._fused_adamw_(
            [on_cpu],
            [gradient],
            [local_part(state["exp_avg"])],
            [local_part(state["exp_avg_sq"])],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if on_cpu is not weights:
            weights.copy_(on_cpu)


class LowPrecisionAdamW(ShardAdamW):
    """Arithmetic in float32, and moments in bfloat16, which take half the memory of float32.

    Bfloat16 has 8 bits of precision. With beta 0.999 a moment moves by a thousandth of its distance
    per step, so rounding to nearest would keep it where it is. Instead it is rounded up or down at
    random, with probabilities that make it move correctly on average (stochastic rounding).

    What is drawn depends on `seed`, the step, the parameter and the shard, and on nothing else.
    Ranks with the same shard, one in each copy of the model, would drift apart if they rounded
    differently. A resumed run draws what the run that was cut off would have drawn.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        parameters = [one for group in self.param_groups for one in group["params"]]
        # One that is seeded anew for each parameter: that takes no memory and waits for no GPU.
        self._generator = torch.Generator(local_part(parameters[0]).device)
        self._draws = {
            parameter: f"{seed} {number} {shard_place(parameter).number}"
            for number, parameter in enumerate(parameters)
        }

    def kept(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Return the moment in bfloat16."""
        return moment.to(parameter.device, torch.bfloat16)

    def first_moment(self, parameter: Tensor) -> Tensor:
        """Return zeros in bfloat16."""
        return torch.zeros_like(parameter, dtype=torch.bfloat16)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one shard."""
        beta1, beta2 = group["betas"]
        number = state["step"].item()
        # On shards, because the arithmetic is elementwise: no rank needs the others for it. For
        # float32 weights `gradient` is the gradient itself, which is overwritten below.
        gradient = local_part(parameter.grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().lerp_(gradient.square_(), 1 - beta2)
        # Only what is kept is rounded; this step uses the exact moments. Rounding comes first,
        # because the division below happens in place.
        # Hashed, because a generator on a CPU takes 32 bits of its seed, and near ones are alike.
        draw = hashlib.blake2b(f"{self._draws[parameter]} {number}".encode(), digest_size=8)
        self._generator.manual_seed(int.from_bytes(draw.digest(), "little"))
        first.copy_(round_at_random(mean, self._generator))
        second.copy_(round_at_random(square, self._generator))
        denominator = square.div_(1 - beta2**number).sqrt_().add_(group["eps"])
        weights = local_part(parameter)
        # Decay acts on the weights and not on the gradient, and before the update, as in the paper.
        wide = weights.float().mul_(1 - group["lr"] * group["weight_decay"])
        wide.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**number))
        weights.copy_(wide)


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
