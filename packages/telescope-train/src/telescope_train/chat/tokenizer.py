"""The tokenizer of a model, with its chat template and the tokens that end an answer."""

from collections.abc import Sequence
from contextlib import suppress

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.errors import ConfigError
from telescope_train.chat.template import SHIPPED_MARKS, read_chat_template
from telescope_train.models.location import first_line, locate_model


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of model `name`; `chat_template` names a template to use instead."""
    location = locate_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer of model {name!r} cannot be loaded: {first_line(error)}"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        require_marks(tokenizer, chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model {name!r} has no chat template; set chat_template to the path of a template"
        )
    return tokenizer


def require_marks(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    """Raise ConfigError unless every mark of a shipped template is one token of the model."""
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
    """Return the ids of all tokens that end a generation of model `name`; loads no weights."""
    location = locate_model(name)
    configs: list[object] = []
    with suppress(OSError):  # a model need not have a generation config
        configs.append(GenerationConfig.from_pretrained(location))
    configs.append(AutoConfig.from_pretrained(location))
    return _stop_ids(configs)


def _stop_ids(configs: Sequence[object]) -> tuple[int, ...]:
    found: list[int] = []
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))
