"""Load a Hugging Face causal language model, with errors that tell the user what to do.

A model is loaded whole on one machine (`load_model`), or prepared without memory (`prepare_model`),
so that it is sharded first and filled from its files afterwards.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from telescope_core.base.errors import ConfigError
from telescope_train.models.file_names import KNOWN_MIXTURES, file_parts
from telescope_train.models.fit import Misfit, empty_model, misfit_text
from telescope_train.models.source import ModelSource, problems_of, read_source, untie
from telescope_train.models.weight_files import WeightFiles, not_finite

_log = logging.getLogger(__name__)

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, and facts about it for the trainer."""

    model: PreTrainedModel
    vocab_size: int
    """Rows of the output head that are tokens, from which a server samples."""
    files: WeightFiles | None = None
    """Location of the weights that `model` does not have yet; None = it has them."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called `name`."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    location: str | None = None,
) -> LoadedModel:
    """Load a causal language model to CPU memory; raises ConfigError if that is impossible.

    `location`: where to read it from, if not from the place that `name` means.
    """
    source = read_source(name, dtype=dtype, trust_remote_code=trust_remote_code, location=location)
    return _whole(source, dtype, trust_remote_code)


def prepare_model(
    name: str, *, dtype: str = "float32", trust_remote_code: bool = False
) -> LoadedModel:
    """Return a model whose weights are still in its `files`, on torch's device `meta`.

    If transformers would do more than copy tensors of files to parameters (files that are not
    safetensors, other names), the model is loaded whole, without `files`.
    """
    source = read_source(name, dtype=dtype, trust_remote_code=trust_remote_code)
    with problems_of(f"model {name!r}", location=source.location):
        empty = None if trust_remote_code else _empty(source, dtype)
    if empty is not None:
        return empty
    _log.warning("%s cannot be read in parts, so every rank loads all of it", name)
    return _whole(source, dtype, trust_remote_code)


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether `model` is a mixture of experts that this version can train."""
    return model.config.model_type in KNOWN_MIXTURES


def _whole(source: ModelSource, dtype: str, trust_remote_code: bool) -> LoadedModel:
    with problems_of(f"model {source.name!r}", location=source.location), no_progress_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=source.config,
            dtype=torch_dtype(dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    require_loaded(source.name, model, info)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        untie(model.config)  # which .bin files decide only when they are read
    return LoadedModel(model=model, vocab_size=source.config.get_text_config().vocab_size)


def require_loaded(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise ConfigError unless transformers found every weight of `model`, and all are finite.

    `info`: the report of transformers with `output_loading_info`.
    """
    found = Misfit.from_keys(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    if not found.is_empty:
        raise ConfigError(misfit_text(name, found, model.config))
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        raise not_finite(name, broken)


def _empty(source: ModelSource, dtype: str) -> LoadedModel | None:
    """Return the model without weights; None if it must be loaded in another way."""
    files, config = source.files, source.config
    if files is None:
        return None
    model = empty_model(config, dtype)
    names = {
        part.name
        for name, parameter in model.named_parameters()
        for part in file_parts(name, tuple(parameter.shape), config.model_type)
    }
    if files.missing(names) or not _buffers_are_known(model):
        return None
    if isinstance(model, PreTrainedModel) and model._keep_in_fp32_modules:
        return None
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source.location)
    model.config.name_or_path = source.location
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
    """Compute the buffers of a model from `prepare_model` that has memory now."""
    for module in model.modules():
        if _is_rotation(module):
            model._init_weights(module)


@torch.no_grad()
def settle_rotations(model: PreTrainedModel, longest: int) -> None:
    """Choose once what `longrope` and `dynamic` rotations are, for `longest` tokens at most.

    transformers chooses for each row, by its longest sequence, so that a sequence would be computed
    otherwise beside a long one than alone. vLLM chooses longrope's once, by `max_model_len`.
    Raises ConfigError for `dynamic` ones beyond the model's positions, of which each length has its
    own.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if not _is_rotation(module) or kind not in ("longrope", "dynamic"):
            continue
        rotation: Any = module
        config = rotation.config
        if kind == "longrope":
            limit = config.rope_parameters["original_max_position_embeddings"]
            if longest > limit:
                device = rotation.inv_freq.device
                long_factors, _ = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=limit + 1)
                rotation.inv_freq.copy_(long_factors)
        elif longest > config.max_position_embeddings:
            raise ConfigError(
                f"model: its rotations (rope_type 'dynamic') depend on a sequence's length beyond "
                f"{config.max_position_embeddings} tokens, and there are some of {longest}; make "
                "them shorter, or use another model"
            )
        rotation.rope_type = "default"  # as it is from now on


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
