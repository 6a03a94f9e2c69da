"""Load a Hugging Face causal language model, with errors that tell the user what to do.

Whole on one machine (`load_model`), or as a frame without memory (`prepare_model`), to be sharded
first and filled from its files afterwards.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from telescope_core.errors import ConfigError
from telescope_train.models.facts import EXPERT_SETTINGS
from telescope_train.models.file_names import KNOWN_MIXTURES, file_parts
from telescope_train.models.location import first_line, locate_model
from telescope_train.models.weight_files import WeightFiles

_log = logging.getLogger(__name__)

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what the trainer needs to know about it."""

    model: PreTrainedModel
    vocab_size: int
    """Rows of the output head that are tokens, which are those that a server samples from."""
    files: WeightFiles | None = None
    """Where the weights are that `model` does not have yet; None = it has them."""


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
    with _problems_of(name):
        config = _config(location, name, trust_remote_code)
        return _whole(location, config, dtype, trust_remote_code)


def prepare_model(
    name: str, *, dtype: str = "float32", trust_remote_code: bool = False
) -> LoadedModel:
    """Return a model whose weights are still in its `files`, on torch's device `meta`.

    Where transformers would do more than copy tensors of files to parameters (quantized weights,
    files that are not safetensors, other names), the model is loaded whole, without `files`.
    """
    location = locate_model(name)
    with _problems_of(name):
        config = _config(location, name, trust_remote_code)
        empty = _empty(location, config, dtype, trust_remote_code)
        if empty is not None:
            return empty
        _log.warning("%s cannot be read in parts, so every rank loads all of it", name)
        return _whole(location, config, dtype, trust_remote_code)


@contextmanager
def _problems_of(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {first_line(error)}") from error


def _config(location: str, name: str, trust_remote_code: bool) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
    for field in EXPERT_SETTINGS:
        if getattr(config, field, None) and config.model_type not in KNOWN_MIXTURES:
            raise ConfigError(
                f"model {name!r} is a mixture of experts of type {config.model_type!r}; this "
                f"version trains those of type {', '.join(KNOWN_MIXTURES)}, and dense models"
            )
    return config


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether `model` is a mixture of experts that this version can train."""
    return model.config.model_type in KNOWN_MIXTURES


def _whole(
    location: str, config: PreTrainedConfig, dtype: str, trust_remote_code: bool
) -> LoadedModel:
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            location,
            config=config,
            dtype=torch_dtype(dtype),
            trust_remote_code=trust_remote_code,
        )
    return LoadedModel(model=model, vocab_size=config.get_text_config().vocab_size)


def _empty(
    location: str, config: PreTrainedConfig, dtype: str, trust_remote_code: bool
) -> LoadedModel | None:
    """Return the model without weights; None if they must be loaded in another way."""
    if trust_remote_code or getattr(config, "quantization_config", None) is not None:
        return None
    files = WeightFiles.of(location)
    if files is None:
        return None
    # A generator of no device: drawing numbers that nobody keeps must not move that of the run.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    names = (
        part.name
        for name, parameter in model.named_parameters()
        for part in file_parts(name, tuple(parameter.shape), config.model_type)
    )
    if files.missing(names) or not _buffers_are_known(model):
        return None
    if isinstance(model, PreTrainedModel) and model._keep_in_fp32_modules:
        return None
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(location)
    model.config.name_or_path = location
    return LoadedModel(
        model=model.eval(), vocab_size=config.get_text_config().vocab_size, files=files
    )


def _buffers_are_known(model: PreTrainedModel) -> bool:
    return all(
        _is_rotation(module) or not any(True for _ in module.buffers(recurse=False))
        for module in model.modules()
    )


def _is_rotation(module: torch.nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__ and hasattr(module, "original_inv_freq")


@torch.no_grad()
def init_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers of a model that `prepare_model` returned and that has memory now."""
    for module in model.modules():
        if _is_rotation(module):
            model._init_weights(module)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers inside the block."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
