"""What backends share around their optimizers: progress, rates, skipped steps, checksums."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from telescope_core.base.errors import TelescopeError
from telescope_train.backends.protocol import BackendSettings
from telescope_train.backends.schedule import learning_rate_factor

MAX_SKIPPED_IN_A_ROW = 5
"""Steps with a gradient that is not finite after which the run ends."""
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""Dtype of weights -> integers of the same size, for checksums of their bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done, including skipped ones; the place in the learning-rate schedule."""
    num_skipped: int = 0
    """Steps that were skipped because the gradient norm was not finite."""
    skipped_in_a_row: int = 0
    """Skipped steps since the last one that was taken."""

    @property
    def num_taken(self) -> int:
        """Steps in which the optimizer changed the weights."""
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
        min_lr_ratio=trainer.min_lr_ratio,
    )
    return trainer.learning_rate * factor


def checksums(values: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that changes with any bit of it."""
    # Integers wrap around and forget no bit, while a sum of floats would round changes away.
    return [
        int(value.detach().contiguous().view(_BITS[value.dtype]).sum(dtype=torch.int64))
        for value in values
    ]
