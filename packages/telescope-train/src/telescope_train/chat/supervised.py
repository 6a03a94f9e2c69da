"""Turns conversations into tokens with the model's chat template, and marks those to learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message
from telescope_train.chat.message_form import message_form
from telescope_train.chat.special_tokens import SpecialTokens
from telescope_train.chat.template import template_text
from telescope_train.chat.turn_end import no_end, turn_end, wrong_end


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedConversation:
    """One conversation as L tokens."""

    token_ids: NDArray[np.int32]
    """[L] ids."""
    mask: NDArray[np.bool_]
    """[L] True for the tokens that the assistant wrote, including its end token."""


class _Piece(NamedTuple):
    text: str
    is_learnt: bool
    behind: int | None
    """The special token before the piece; None at the beginning of a text."""


@dataclass(slots=True)
class _Draft:
    """A sample as text."""

    text: str
    pieces: list[_Piece]
    end_id: int | None
    """The token that ends its last turn; None if there is none."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    *,
    end_ids: Sequence[int] = (),
) -> list[list[RenderedConversation]]:
    """Render whole conversations, each ending with an assistant message, as one or more samples.

    Each assistant turn is learned once, behind what the template shows before it. If the template
    shows an earlier turn differently from how it was learned, another sample begins. `end_ids` are
    the tokens that end a turn; EOS is always one. Each turn is encoded alone, as it is sampled.
    """
    special = _special_tokens(tokenizer, end_ids)
    turns = [
        (number, end)
        for number, messages in enumerate(conversations)
        for end, message in enumerate(messages)
        if message.role == "assistant"
    ]
    form = message_form(template_text(tokenizer), partial(_text, tokenizer))
    plain = [[form.plain(one) for one in messages] for messages in conversations]
    prompts = _texts(tokenizer, [plain[n][:end] for n, end in turns], is_prompt=True)
    wholes = _texts(tokenizer, [plain[n][: end + 1] for n, end in turns], is_prompt=False)
    drafts: list[list[_Draft]] = [[] for _ in conversations]
    for (number, _), prompt, whole in zip(turns, prompts, wholes, strict=True):
        if not whole.startswith(prompt):
            raise ConfigError(
                "the chat template does not continue its own generation prompt: the text "
                f"{whole!r} does not start with {prompt!r}; set chat_template to a template "
                "that continues it"
            )
        _add_turn(drafts[number], prompt, whole[len(prompt) :], special)
    assert all(drafts), "a conversation without an assistant message cannot be learned from"
    return _encoded(special, drafts)


def end_note(tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int]) -> str | None:
    """Return what to know if the template ends answers with no token; None if it ends them.

    Raises ConfigError if it ends them with a token at which the model would not end.
    """
    special = _special_tokens(tokenizer, end_ids)
    form = message_form(template_text(tokenizer), partial(_text, tokenizer))

    def text(told: Sequence[Message], opens: bool) -> str:
        return _texts(tokenizer, [[form.plain(one) for one in told]], is_prompt=opens)[0]

    found = turn_end(text, special)
    if (reason := wrong_end(found, special)) is not None:
        raise ConfigError(reason)
    return no_end(found, special)


def _special_tokens(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> SpecialTokens:
    eos = tokenizer.eos_token_id
    ends = dict.fromkeys((*end_ids, *([eos] if eos is not None else [])))
    return SpecialTokens(tokenizer, stop_token_ids=list(ends), marks=())


def _add_turn(drafts: list[_Draft], prompt: str, turn: str, special: SpecialTokens) -> None:
    """Add one turn. It is learned up to its end token, not what the template writes after that."""
    end = special.first_end(turn)
    learnt = turn[: end.stop] if end is not None else turn
    last = drafts[-1] if drafts else None
    if last is not None and prompt.startswith(last.text):
        between = prompt[len(last.text) :]
        last.pieces.append(
            _Piece(between, False, special.anchor if last.end_id is None else last.end_id)
        )
    else:
        drafts.append(last := _Draft(text="", pieces=[_Piece(prompt, False, None)], end_id=None))
    last.pieces.append(_Piece(learnt, True, special.anchor))
    last.text = prompt + learnt
    last.end_id = end.token_id if end is not None else None


def _encoded(
    special: SpecialTokens, drafts: Sequence[Sequence[_Draft]]
) -> list[list[RenderedConversation]]:
    """Encode all pieces in one call, because each call of the tokenizer has a fixed cost."""
    pieces = [piece for samples in drafts for draft in samples for piece in draft.pieces]
    ids = iter(special.encode_each([(piece.behind, piece.text) for piece in pieces]))
    return [
        [_sample([(next(ids), piece.is_learnt) for piece in draft.pieces]) for draft in samples]
        for samples in drafts
    ]


def _sample(pieces: Sequence[tuple[list[int], bool]]) -> RenderedConversation:
    return RenderedConversation(
        token_ids=np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in pieces]),
        mask=np.repeat([is_learnt for _, is_learnt in pieces], [len(ids) for ids, _ in pieces]),
    )


def _texts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, Any]]],
    *,
    is_prompt: bool,
) -> list[str]:
    """Render all conversations in one call, so that the template is compiled once."""
    return tokenizer.apply_chat_template(
        conversations, tokenize=False, add_generation_prompt=is_prompt
    )


def _text(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Render one conversation."""
    return tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, tokenize=False)
