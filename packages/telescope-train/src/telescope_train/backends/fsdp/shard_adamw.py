"""The part of AdamW over shards that is independent of how moments are stored.

Paper: arXiv:1711.05101, algorithm 2.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ShardAdamW(torch.optim.Optimizer):
    """Updates one parameter after the other; subclasses define the update and the moments."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Convert loaded moments, to which torch gives the dtype and device of the weights."""
        super().__setstate__(state)
        for moments in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name] = self.kept(moments[name])

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
    def kept(self, moment: Tensor) -> Tensor:
        """Return a moment in the form in which it is kept between steps."""

    @abstractmethod
    def first_moment(self, parameter: Tensor) -> Tensor:
        """Return the moment before the first step: zeros in the form that is kept."""

    @abstractmethod
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update this rank's shard of `parameter` and its moments; `step` includes this one."""
