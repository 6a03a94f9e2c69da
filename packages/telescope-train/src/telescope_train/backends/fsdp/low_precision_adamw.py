"""AdamW with its two moments in bfloat16, which takes half the memory of float32.

Bfloat16 has 8 bits of precision. With beta 0.999 a moment moves by a thousandth of its distance per
step, so rounding to nearest would keep it where it is. Instead it is rounded up or down at random,
with probabilities that make it move correctly on average (stochastic rounding).
Paper: arXiv:1711.05101, algorithm 2. Deviation: the dtype of the moments.
"""

from typing import Any

import torch
from torch import Tensor

from telescope_train.backends.fsdp.shard_adamw import ShardAdamW
from telescope_train.backends.fsdp.sharding import local_part
from telescope_train.models.rounding import round_at_random


class LowPrecisionAdamW(ShardAdamW):
    """AdamW with float32 arithmetic; only the moments kept between steps have less precision."""

    def kept(self, moment: Tensor) -> Tensor:
        """Return the moment in bfloat16."""
        return moment.to(torch.bfloat16)

    def first_moment(self, parameter: Tensor) -> Tensor:
        """Return zeros in bfloat16."""
        return torch.zeros_like(parameter, dtype=torch.bfloat16)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one shard; the module docstring says how."""
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
        first.copy_(round_at_random(mean))
        second.copy_(round_at_random(square))
        denominator = square.div_(1 - beta2**number).sqrt_().add_(group["eps"])
        weights = local_part(parameter)
        # Decay acts on the weights and not on the gradient, and before the update, as in the paper.
        wide = weights.float().mul_(1 - group["lr"] * group["weight_decay"])
        wide.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**number))
        weights.copy_(wide)
