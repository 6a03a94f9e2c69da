"""The tokenizer of a model, with its chat template and the tokens that end an answer.

Importing it imports no transformers, which takes seconds: a simulated run needs no tokenizer.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from telescope_core.base.errors import ConfigError
from telescope_train.chat.template import SHIPPED_MARKS, read_chat_template, template_text
from telescope_train.models.location import locate_model
from telescope_train.models.source import problems_of

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class ModelSettings(Protocol):
    """The settings that a tokenizer depends on, in whatever section they are declared."""

    @property
    def model(self) -> str:
        """Folder or Hub id of the model."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template that replaces the one of the model's tokenizer."""
        ...

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that comes with the model may run."""
        ...


# The settings as a whole, so that no caller can leave one out.
def load_tokenizer(settings: ModelSettings) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the model with its chat template; ConfigError if it has none."""
    tokenizer = bare_tokenizer(settings)
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template)
        require_marks(tokenizer, settings.chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model {settings.model!r} has no chat template; set chat_template to the path of a "
            "template, or to its text"
        )
    return tokenizer


def vocabulary_size(settings: ModelSettings) -> int:
    """Return the number of tokens of the model's tokenizer, including added ones."""
    return len(bare_tokenizer(settings))


def bare_tokenizer(settings: ModelSettings) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the model as it is, with or without a chat template."""
    from transformers import AutoTokenizer

    location = locate_model(settings.model)
    trust = settings.trust_remote_code
    folder = Path(location)
    is_lacking = folder.is_dir() and not (folder / "tokenizer.json").is_file()
    lacking = (
        f"model {settings.model!r} has no tokenizer.json in its folder; copy it, with "
        "tokenizer_config.json, from the model that this one was made from"
    )
    try:
        with problems_of(f"the tokenizer of model {settings.model!r}", location=location):
            tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust)
    except ConfigError as error:
        if is_lacking:
            raise ConfigError(f"{lacking} ({error})") from error
        raise
    files = tokenizer.vocab_files_names.values()
    if is_lacking and files and not any((folder / name).is_file() for name in files):
        raise ConfigError(lacking)  # transformers made one without a vocabulary
    return tokenizer


def require_marks(tokenizer: "PreTrainedTokenizerBase", chat_template: str) -> None:
    """Raise ConfigError unless every mark of a shipped template is one token of the model."""
    lacking = _lacking(tokenizer, chat_template)
    if lacking:
        raise ConfigError(
            f"chat_template {chat_template!r} is for models with the tokens "
            f"{', '.join(SHIPPED_MARKS[chat_template])}; this model's tokenizer has no "
            f"{', '.join(lacking)}; give {appending_templates(tokenizer)} that fits the model"
        )


def appending_templates(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Say what keeps every turn as it was: the shipped templates that fit the model, or a file."""
    fitting = [repr(name) for name in SHIPPED_MARKS if not _lacking(tokenizer, name)]
    return " or ".join([*fitting, "a Jinja file"])


def _lacking(tokenizer: "PreTrainedTokenizerBase", chat_template: str) -> list[str]:
    return [
        mark
        for mark in SHIPPED_MARKS.get(chat_template, ())
        if len(tokenizer.encode(mark, add_special_tokens=False)) != 1
        or tokenizer.convert_tokens_to_ids(mark) in (None, tokenizer.unk_token_id)
    ]


def load_stop_ids(settings: ModelSettings) -> tuple[int, ...]:
    """Return the ids of all tokens that end a generation of the model; loads no weights."""
    from transformers import AutoConfig, GenerationConfig

    location, trust = locate_model(settings.model), settings.trust_remote_code
    configs: list[object] = []
    with suppress(OSError):  # a model need not have a generation config
        configs.append(GenerationConfig.from_pretrained(location))
    with problems_of(f"model {settings.model!r}", location=location):
        configs.append(AutoConfig.from_pretrained(location, trust_remote_code=trust))
    return _stop_ids(configs)


def _stop_ids(configs: Sequence[object]) -> tuple[int, ...]:
    found: list[int] = []
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


_SHOWN = 3
"""Most tokens that a message names."""


def token_difference(
    tokenizer: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase"
) -> str | None:
    """Return how the ids of `other` differ for tokens of `tokenizer`, for people; None = nowhere.

    What `other` has beyond them does not matter.
    """
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    differing = sorted((number, text) for text, number in own.items() if theirs.get(text) != number)
    if not differing:
        return None
    shown = ", ".join(f"{text!r} ({number})" for number, text in differing[:_SHOWN])
    return (
        f"has another tokenizer: of the model's {len(own):,} tokens, {len(differing):,} have "
        f"another id there or none, such as {shown}; its probabilities would be those of other "
        "texts, so use a model with the same tokens"
    )


def require_rows(name: str, tokenizer: "PreTrainedTokenizerBase", num_rows: int) -> str | None:
    """Raise ConfigError if a token of texts or templates has no row in the embedding.

    Some models keep special tokens without a row, such as the picture token of a model that reads
    only text. Returns a note about them, or None if there are none.
    """
    every = tokenizer.get_vocab().items()
    beyond = {number: token for token, number in every if number >= num_rows}
    if not beyond:
        return None
    template = template_text(tokenizer) if tokenizer.chat_template else ""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    kinds = tokenizer.added_tokens_decoder
    used = [
        token
        for number, token in sorted(beyond.items())
        if number not in kinds or not kinds[number].special or number in ends or token in template
    ]
    if used:
        raise ConfigError(
            f"the tokenizer of model {name!r} has {len(tokenizer)} tokens and its embedding "
            f"{num_rows} rows: {_some(used)} would be outside of it; take the tokenizer that "
            "belongs to the weights, or save the model after "
            "model.resize_token_embeddings(len(tokenizer))"
        )
    return (
        f"the special tokens {_some([beyond[number] for number in sorted(beyond)])} have no row in "
        "the embedding of this model; a prompt that contains one of them fails"
    )


def _some(tokens: list[str]) -> str:
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return f"{', '.join(map(repr, tokens[:_SHOWN]))}{more}"
