"""AdamW with its two moments in bfloat16, which takes half the memory of float32.

Bfloat16 has 8 bits of precision. With beta 0.999 a moment moves by a thousandth of its distance per
step, so rounding to nearest would keep it where it is. Instead it is rounded up or down at random,
with probabilities that make it move correctly on average (stochastic rounding).
Paper: arXiv:1711.05101, algorithm 2. Deviation: the dtype of the moments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from telescope_train.backends.fsdp.sharding import local_part
from telescope_train.models.rounding import round_at_random


class LowPrecisionAdamW(torch.optim.Optimizer):
    """All arithmetic is in float32; only the moments kept between steps are narrow."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the moments narrow; torch casts loaded state to the dtype of the weights."""
        super().__setstate__(state)
        for moments in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name] = moments[name].to(torch.bfloat16)

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
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        number = state["step"].item()
        # On shards, because the arithmetic is elementwise: no rank needs the others for it. For
        # float32 weights `gradient` is the gradient itself, which is overwritten below.
        gradient = local_part(parameter.grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().lerp_(gradient.square_(), 1 - beta2)
        # Only what is kept is rounded; this step uses the exact moments. Rounding comes first,
        # because the division below happens in place.
        first.copy_(round_at_random(mean))
        second.copy_(round_at_random(square))
        denominator = square.div_(1 - beta2**number).sqrt_().add_(group["eps"])
        weights = local_part(parameter)
        # Decay acts on the weights and not on the gradient, and before the update, as in the paper.
        wide = weights.float().mul_(1 - group["lr"] * group["weight_decay"])
        wide.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**number))
        weights.copy_(wide)
