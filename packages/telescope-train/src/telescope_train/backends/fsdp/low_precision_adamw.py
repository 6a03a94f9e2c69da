"""AdamW whose two moments are kept in bfloat16: half the memory of float32 ones.

Bfloat16 has 8 bits of precision, and with beta 0.999 a moment moves by a thousandth of its
distance per step: rounded to nearest it would stand still. It is rounded up or down at random
instead, by how near each is, so that it moves right on average (stochastic rounding).
Paper: arXiv:1711.05101, algorithm 2. Deviation: the dtype of the moments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from telescope_train.backends.fsdp.sharding import local_part


class LowPrecisionAdamW(torch.optim.Optimizer):
    """All arithmetic is float32; only what is kept between steps is narrow."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the moments narrow: loading brings everything to the dtype of the weights."""
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
        gradient = local_part(parameter.grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().lerp_(gradient.square_(), 1 - beta2)
        first.copy_(round_at_random(mean))
        second.copy_(round_at_random(square))
        denominator = square.div_(1 - beta2**number).sqrt_().add_(group["eps"])
        weights = local_part(parameter)
        wide = weights.float().mul_(1 - group["lr"] * group["weight_decay"])
        wide.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**number))
        weights.copy_(wide)


def round_at_random(values: Tensor) -> Tensor:
    """Return float32 `values` in bfloat16, each neighbour as probable as it is near.

    A bfloat16 is the upper half of a float32: a random number below one unit of it is added to the
    bits, and the lower half is cut off.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
