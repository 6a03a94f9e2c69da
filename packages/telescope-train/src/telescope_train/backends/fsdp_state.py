"""What a sharded model leaves on disk: checkpoints to continue from, and Hugging Face exports."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedModel

from telescope_train.checkpoint import load_state, save_state, saved_keys, whole_folder
from telescope_train.config.schema import ModelSection
from telescope_train.models.load import load_tokenizer
from telescope_train.models.quiet import no_progress_bars
from telescope_train.seeding import random_state, set_random_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training is."""

    step: int = 0
    """Steps done, skipped ones included; the place in the learning-rate schedule."""
    num_skipped: int = 0
    skipped_in_a_row: int = 0

    def after(self, *, is_skipped: bool) -> "Progress":
        """Return the progress one step later."""
        return replace(
            self,
            step=self.step + 1,
            num_skipped=self.num_skipped + is_skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if is_skipped else 0,
        )


def save(
    folder: str | Path,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write a checkpoint; every rank calls it."""
    weights, moments = get_state_dict(policy, optimizer)
    state = {
        "model": weights,
        "optimizer": moments,
        "progress": asdict(progress),
        _random_key(): random_state(),
    }
    save_state(folder, state)


def load(folder: str | Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Read a checkpoint into the model and optimiser; returns the progress.

    A rank that the checkpoint has no random state for keeps the one it was seeded with.
    """
    weights, moments = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": moments,
        "progress": asdict(Progress()),
    }
    has_random_state = any(key.startswith(_random_key()) for key in saved_keys(folder))
    if has_random_state:
        state[_random_key()] = random_state()
    load_state(folder, state)
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if has_random_state:
        set_random_state(state[_random_key()])
    return Progress(**state["progress"])


def export(
    folder: str | Path, lm: PreTrainedModel, weights: dict[str, Tensor], settings: ModelSection
) -> None:
    """Write a Hugging Face folder on rank 0, whole or not at all; every rank calls it."""
    with whole_folder(Path(folder)) as partial:
        if dist.get_rank() != 0:
            return
        with no_progress_bars():
            lm.save_pretrained(partial, state_dict=weights)
        tokenizer = load_tokenizer(
            settings.model,
            chat_template=settings.chat_template,
            trust_remote_code=settings.trust_remote_code,
        )
        tokenizer.save_pretrained(partial)


def _random_key() -> str:
    return f"random-{dist.get_rank()}"
