"""Load a Hugging Face causal language model, with errors that tell the user what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from telescope_core.errors import ConfigError
from telescope_train.models.location import first_line, locate_model

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what the trainer needs to know about it."""

    model: PreTrainedModel
    vocab_size: int
    """Rows of the output head that are tokens, which are those that a server samples from."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called `name`."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def load_model(
    name: str, *, dtype: str = "float32", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a causal language model to CPU memory; raises ConfigError if that is impossible."""
    location = locate_model(name)
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        _check_architecture(config, name)
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                location,
                config=config,
                dtype=torch_dtype(dtype),
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
    return LoadedModel(
        model=model,
        vocab_size=config.get_text_config().vocab_size,
    )


def _check_architecture(config: object, name: str) -> None:
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, field, None):
            raise ConfigError(
                f"model {name!r} is a mixture of experts ({field} = {getattr(config, field)}); "
                "this version trains dense models"
            )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers inside the block."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
