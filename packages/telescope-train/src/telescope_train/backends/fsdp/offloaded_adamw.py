"""AdamW whose moments stay in CPU memory, where its step is computed too.

Weights and gradients stay where they are. Each parameter's shard and gradient are copied to the CPU
for the step, one after the other, and the new values back. What crosses is 12 bytes per float32
parameter and step; what a GPU no longer holds is 8.
Paper: arXiv:1711.05101, algorithm 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from telescope_train.backends.fsdp.sharding import local_part

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.Optimizer):
    """The same arithmetic as torch's fused AdamW on a CPU, to the bit."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the moments on the CPU; torch moves loaded state to the device of the weights."""
        super().__setstate__(state)
        for moments in self.state.values():
            for name in _MOMENTS:
                if name in moments:
                    moments[name] = moments[name].cpu()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        assert closure is None, "gradients are accumulated before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, device="cpu")
        weights = local_part(parameter)
        # On a CPU these are the shards themselves.
        on_cpu, gradient = weights.cpu(), local_part(parameter.grad).cpu()
        state["step"] += 1
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
