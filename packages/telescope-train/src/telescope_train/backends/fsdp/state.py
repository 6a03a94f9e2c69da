"""A sharded model on disk: checkpoints to continue from, and Hugging Face exports."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError
from telescope_train.backends.distributed_checkpoint import (
    folder_of_all_ranks,
    load_state,
    saved_keys,
)
from telescope_train.backends.progress import Progress, random_state, set_random_state
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.config.schema import ModelSection
from telescope_train.models.load import no_progress_bars
from telescope_train.models.location import ADAPTER_FOLDER
from telescope_train.models.lora import write_adapter
from telescope_train.models.saving import save_model

_TRAINED = StateDictOptions(ignore_frozen_params=True)


def training_state(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, Any]:
    """Return everything a later run needs to continue; every rank calls it.

    An optimizer that took no step yet has no moments. Asking torch for them would make it take a
    step with gradients of 0, and Adam would count that step.
    """
    state: dict[str, Any] = {
        "model": weights_of(policy),
        "progress": asdict(progress),
        _random_key(): random_state(),
    }
    if progress.num_taken:
        state["optimizer"] = get_optimizer_state_dict(policy, optimizer, options=_TRAINED)
    return state


def weights_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the sharded weights of `model` in the form of a checkpoint.

    If some are frozen (LoRA), only the others, because a resumed run loads the same model again.
    """
    # With duplicates, because a tied weight has two names and torch's dictionary uses both.
    named = list(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    weights = get_model_state_dict(model)
    # All frozen: the copy that serves as reference. It is saved whole once it was updated.
    if len(frozen) == len(named):
        return weights
    return {name: value for name, value in weights.items() if name not in frozen}


def set_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Load the weights that `weights_of` returned."""
    # Not strict, because with LoRA the frozen weights are absent.
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))


def load(folder: str | Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Read a checkpoint into the model and optimizer; returns the progress.

    The optimizer keeps its own settings, such as its weight decay. The checkpoint's settings belong
    to the run that wrote it, and a run that continues from it may have others.

    A random generator without a state in the checkpoint keeps the state that it was seeded with.
    These are a GPU's generator if the checkpoint is from a CPU, and all generators of a rank that
    did not exist then.
    """
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    keys = saved_keys(folder)
    if not any(key.startswith("progress.") for key in keys):
        raise ConfigError(
            f"{str(folder)!r} holds weights alone (checkpoint_save_training_state = false), so "
            "training cannot continue from it; use `telescope export`, and start from the export"
        )
    # torch fills an existing state in place and refuses keys that the checkpoint does not have, so
    # the state is built from the keys that are there.
    state: dict[str, Any] = {
        "model": weights_of(policy),
        "progress": asdict(Progress()),
    }
    if any(key.startswith("optimizer.") for key in keys):
        # For want of moments to fill, torch takes a step here, at rate 0 with gradients of 0.
        state["optimizer"] = get_optimizer_state_dict(policy, optimizer, options=_TRAINED)
    generators = {
        name: value
        for name, value in random_state().items()
        if any(key.startswith(f"{_random_key()}.{name}") for key in keys)
    }
    if generators:
        state[_random_key()] = generators
    load_state(folder, state)
    set_weights(policy, state["model"])
    if "optimizer" in state:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"], options=_TRAINED)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
    if generators:
        set_random_state(state[_random_key()])
    return Progress(**state["progress"])


def export(
    folder: str | Path,
    lm: PreTrainedModel,
    weights: dict[str, Tensor],
    settings: ModelSection,
    *,
    adapter: dict[str, Tensor],
) -> None:
    """Write a Hugging Face folder on rank 0, complete or not at all; every rank calls it."""
    with folder_of_all_ranks(Path(folder)) as partial:
        if dist.get_rank() != 0:
            return
        with no_progress_bars():
            save_model(lm, partial, state_dict=weights)
        if adapter:
            write_adapter(partial / ADAPTER_FOLDER, lm, adapter)
        load_tokenizer(settings).save_pretrained(partial)


def _random_key() -> str:
    # One key per rank: of plain values under the same key, a checkpoint keeps only one rank's.
    return f"random-{dist.get_rank()}"
