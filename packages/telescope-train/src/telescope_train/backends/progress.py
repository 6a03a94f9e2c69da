"""Shared by backends around their optimizers: progress, rates, changed weights, random states."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from telescope_core.base.errors import TelescopeError
from telescope_train.backends.protocol import BackendSettings

MAX_SKIPPED_IN_A_ROW = 5
"""Steps in a row with a non-finite gradient after which the run ends."""
MAX_SAMPLED_WEIGHTS = 2**16
"""Weights of a rank that are checked for changes by a step."""
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""Dtype of weights -> integers of the same size, for checksums of their bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of training."""

    step: int = 0
    """Optimizer steps done, including skipped ones; the place in the learning-rate schedule."""
    num_skipped: int = 0
    """Number of steps that were skipped because the gradient norm was not finite."""
    skipped_in_a_row: int = 0
    """Number of skipped steps since the last step that was taken."""

    @property
    def num_taken(self) -> int:
        """Number of steps in which the optimizer changed the weights."""
        return self.step - self.num_skipped

    def after(self, *, is_skipped: bool) -> "Progress":
        """Return the progress after one more step."""
        return replace(
            self,
            step=self.step + 1,
            num_skipped=self.num_skipped + is_skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if is_skipped else 0,
        )

    def require_finite(self, norm: float) -> None:
        """Raise TelescopeError after too many skipped steps; `norm` is that of the last one."""
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TelescopeError(
                f"the gradient norm was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row "
                f"(now {norm}); lower learning_rate, or look at the last batch's log-probs"
            )


def scheduled_rate(settings: BackendSettings, step: int) -> float:
    """Return the learning rate of the optimizer step with this number, from 0."""
    trainer = settings.trainer
    factor = learning_rate_factor(
        step,
        trainer.lr_scheduler,
        warmup_steps=trainer.warmup_steps,
        number_of_steps=settings.number_of_steps,
        cooldown_steps=trainer.cooldown_steps,
        min_lr_ratio=trainer.min_lr_ratio,
    )
    return trainer.learning_rate * factor


class RoundedWeights:
    """A sample of the weights that are kept in bfloat16, to measure how many a step changes.

    A change that is smaller than half of the distance between two bfloat16 numbers is lost.
    """

    def __init__(self, shards: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`shards`: weights with their gradients, before the step."""
        kept = [
            (weights, gradient)
            for weights, gradient in shards
            if weights.dtype is torch.bfloat16 and weights.is_contiguous()
        ]
        every = sum(weights.numel() for weights, _ in kept) // MAX_SAMPLED_WEIGHTS + 1
        self._pairs = [(w.detach().view(-1)[::every], g.reshape(-1)[::every]) for w, g in kept]
        self._before = [weights.clone() for weights, _ in self._pairs]

    def changed(self) -> float | None:
        """Return the share of weights with a gradient that have changed; None if there are none.

        Waits for a GPU.
        """
        if not self._pairs:
            return None
        moved = torch.cat([w != b for (w, _), b in zip(self._pairs, self._before, strict=True)])
        learns = torch.cat([gradient != 0 for _, gradient in self._pairs])
        num_moved, num_all = torch.stack([(moved & learns).sum(), learns.sum()]).tolist()
        return num_moved / num_all if num_all else None


def checksums(values: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that changes with any bit of it."""
    # Integers wrap around and forget no bit, while a sum of floats would round changes away.
    return [
        int(value.detach().contiguous().view(_BITS[value.dtype]).sum(dtype=torch.int64))
        for value in values
    ]


Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int,
    schedule: Schedule,
    *,
    warmup_steps: int,
    number_of_steps: int,
    cooldown_steps: int | None = None,
    min_lr_ratio: float,
) -> float:
    """Return the factor of `learning_rate` at `step` (from 0).

    Warmup rises linearly from 1 / `warmup_steps` and reaches 1 at step `warmup_steps - 1`. Decay
    then falls from 1 to `min_lr_ratio`, which step `number_of_steps`, after the last, would have;
    with `cooldown_steps`, over that many last steps (warmup-stable-decay, arXiv:2404.06395).
    """
    if schedule == "none":
        return 1.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    falling = number_of_steps - warmup_steps if cooldown_steps is None else cooldown_steps
    done = (step - (number_of_steps - falling)) / max(1, falling)
    progress = min(1.0, max(0.0, done))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


def seed_everything(seed: int) -> None:
    """Seed every generator that this process may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of every generator."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of every generator; that of a GPU may be absent."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
