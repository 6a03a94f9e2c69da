"""Finding and loading a Hugging Face causal language model, with errors a person can act on."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.errors import ConfigError
from telescope_train.chat_template import SHIPPED_MARKS, read_chat_template
from telescope_train.model_location import locate_model
from telescope_train.models.quiet import no_progress_bars

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what the trainer must know of it."""

    model: PreTrainedModel
    vocab_size: int
    """Rows of the output head that are tokens; what a server samples from."""
    eos_ids: tuple[int, ...]
    """Every token that ends a generation."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called `name`."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def load_model(
    name: str, *, dtype: str = "float32", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a causal language model to CPU memory; raises ConfigError when that is impossible."""
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
        raise ConfigError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    return LoadedModel(
        model=model,
        vocab_size=config.get_text_config().vocab_size,
        eos_ids=_stop_ids([model.generation_config, model.config]),
    )


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of model `name`; `chat_template` names one to use instead."""
    location = locate_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer of model {name!r} cannot be loaded: {_first_line(error)}"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        require_marks(tokenizer, chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model {name!r} has no chat template; set chat_template to the path of one"
        )
    return tokenizer


def require_marks(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    """Raise ConfigError unless the marks of a shipped template are tokens of the model."""
    lacking = [
        mark
        for mark in SHIPPED_MARKS.get(chat_template, ())
        if len(tokenizer.encode(mark, add_special_tokens=False)) != 1
        or tokenizer.convert_tokens_to_ids(mark) in (None, tokenizer.unk_token_id)
    ]
    if lacking:
        raise ConfigError(
            f"chat_template {chat_template!r} is for models with the tokens "
            f"{', '.join(SHIPPED_MARKS[chat_template])}; this model's tokenizer has no "
            f"{', '.join(lacking)}; give a Jinja file that fits the model"
        )


def load_stop_ids(name: str) -> tuple[int, ...]:
    """Return every token that ends a generation of model `name`, without loading its weights."""
    location = locate_model(name)
    configs: list[object] = []
    with suppress(OSError):  # a model need not have a generation config
        configs.append(GenerationConfig.from_pretrained(location))
    configs.append(AutoConfig.from_pretrained(location))
    return _stop_ids(configs)


def _check_architecture(config: object, name: str) -> None:
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, field, None):
            raise ConfigError(
                f"model {name!r} is a mixture of experts ({field} = {getattr(config, field)}); "
                "this version trains dense models"
            )


def _stop_ids(configs: Sequence[object]) -> tuple[int, ...]:
    found: list[int] = []
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    return f"{text[0] if text else type(error).__name__}{offline}"
