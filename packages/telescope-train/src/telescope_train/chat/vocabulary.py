"""Check that every token that a text can contain has a row in the embedding."""

from typing import TYPE_CHECKING

from telescope_core.base.errors import ConfigError
from telescope_train.chat.template import template_text

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_SHOWN = 3
"""Most tokens that a message names."""


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
