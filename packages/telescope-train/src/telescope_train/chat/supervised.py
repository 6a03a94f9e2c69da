"""Convert conversations to tokens with the model's chat template, and mark those to learn."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message, Tools
from telescope_train.chat.message_form import REFUSALS, message_form
from telescope_train.chat.special_tokens import SpecialTokens, no_end, turn_end, wrong_end
from telescope_train.chat.template import template_text
from telescope_train.chat.tokenizer import appending_templates

_SHOWN = 30
"""Characters on each side of a place that an error shows."""


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
    """A sample before it is tokenized."""

    text: str
    pieces: list[_Piece]
    end_id: int | None
    """The token that ends its last turn; None if there is none."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    *,
    tools: Sequence[Tools] | None = None,
    end_ids: Sequence[int] = (),
    labels: Sequence[str] | None = None,
    learnt: Sequence[Collection[int]] | None = None,
    moment: datetime | None = None,
) -> list[list[RenderedConversation]]:
    """Render conversations, each ending with an assistant message, as one or more samples each.

    Each assistant turn is learned once, behind what the template shows before it. If the template
    shows an earlier turn differently from how it was learned, another sample begins. `tools` are
    those that each conversation offers; None = none does. `end_ids` are the tokens that end a turn;
    EOS is always one. Each turn is encoded alone, as it is sampled. `labels` name the conversations
    in error messages. `learnt` are the places of the assistant turns to learn in each; None = all.
    `moment` is what a template shows as the present, such as its date; None = now.
    Raises ConfigError if the template leaves out tools, or the thinking, text or calls of a turn to
    learn, or refuses a conversation, and for a turn that has the text of an end token.
    """
    special = _special_tokens(tokenizer, end_ids)
    turns = [
        (number, end)
        for number, messages in enumerate(conversations)
        for end, message in enumerate(messages)
        if message.role == "assistant" and (learnt is None or end in learnt[number])
    ]
    render = _render_at(tokenizer, moment or datetime.now())
    form = message_form(template_text(tokenizer), partial(_text, render))
    plain = [[form.plain(one) for one in messages] for messages in conversations]
    offered = [tools[n] if tools is not None else () for n, _ in turns]
    named = labels or [f"conversation {number}" for number in range(len(conversations))]
    names = [named[n] for n, _ in turns]
    told, said = [plain[n][:end] for n, end in turns], [plain[n][: end + 1] for n, end in turns]
    prompts = _texts(render, told, offered, is_prompt=True, names=names)
    wholes = _texts(render, said, offered, is_prompt=False, names=names)
    drafts: list[list[_Draft]] = [[] for _ in conversations]
    for (number, end), prompt, whole in zip(turns, prompts, wholes, strict=True):
        if not whole.startswith(prompt):
            why = _why_apart(conversations[number], end, prompt, whole)
            raise ConfigError(f"{named[number]}: {why}")
        _require_one_end(plain[number][end], special, f"{named[number]}: message {end}")
        text = _add_turn(drafts[number], prompt, whole[len(prompt) :], special)
        if (lost := _left_out(conversations[number][end], text)) is not None:
            raise ConfigError(
                f"{named[number]}: the model's chat template leaves out {lost} of message {end}, "
                f"so the model would learn {text!r:.80}; set chat_template to "
                f"{appending_templates(tokenizer)} that shows thinking, text and calls of a turn, "
                "or remove the row"
            )
    assert all(drafts), "a conversation without an assistant message cannot be learned from"
    return _encoded(special, drafts)


def end_note(tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int]) -> str | None:
    """Return a remark if the template ends answers with no token; None if it does.

    Raises ConfigError if it ends them with a token at which the model would not end.
    """
    special = _special_tokens(tokenizer, end_ids)
    render = _render_at(tokenizer, datetime.now())
    form = message_form(template_text(tokenizer), partial(_text, render))

    def text(told: Sequence[Message], opens: bool) -> str:
        messages = [form.plain(one) for one in told]
        return _texts(render, [messages], [()], is_prompt=opens, names=["a question"])[0]

    found = turn_end(text, special)
    if (reason := wrong_end(found, special)) is not None:
        raise ConfigError(reason)
    return no_end(found, special)


def _special_tokens(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> SpecialTokens:
    eos = tokenizer.eos_token_id
    ends = dict.fromkeys((*end_ids, *([eos] if eos is not None else [])))
    return SpecialTokens(tokenizer, stop_token_ids=list(ends), marks=())


def _require_one_end(message: Mapping[str, Any], special: SpecialTokens, where: str) -> None:
    """Refuse a turn in which the text of an end token was written; `where` names it.

    Sampled, that text is the token, so no model can write what stands behind it in the same turn.
    """
    for value in message.values():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if (end := special.first_end(text)) is not None:
            around = text[max(0, end.start - _SHOWN) : end.stop + _SHOWN]
            raise ConfigError(
                f"{where} has {text[end.start : end.stop]!r} in {around!r}, at which the model "
                "would end its turn, so what follows could not be learned; remove that text from "
                "the message, or remove the row"
            )


def _why_apart(messages: Sequence[Message], end: int, prompt: str, whole: str) -> str:
    """Return why `whole`, the text up to turn `end`, does not begin with that turn's prompt."""
    if end and messages[end - 1].role == "assistant":
        return (
            f"messages {end - 1} and {end} are two assistant messages that follow each other, "
            "which the model's chat template does not take: with the second, it shows the first "
            "differently; join them, put a message between them, remove the row, or set "
            "chat_template to a template that takes them"
        )
    both = enumerate(zip(prompt, whole, strict=False))
    same = next((place for place, (one, other) in both if one != other), len(whole))
    shown = slice(max(0, same - _SHOWN), same + _SHOWN)
    return (
        "the chat template does not continue its own generation prompt: where the prompt has "
        f"{prompt[shown]!r}, the text with the answer has {whole[shown]!r}; set chat_template to "
        "a template that continues it"
    )


def _left_out(message: Message, learnt: str) -> str | None:
    """Return what of a turn does not stand in its learned text; None if all does."""
    # Templates may write the thinking in a content anew.
    before, _, content = message.content.rpartition("</think>")
    content = content.strip()
    for thinking in (message.reasoning, before.rpartition("<think>")[2]):
        if thinking.strip() not in learnt:
            return "the thinking"
    if content not in learnt:
        return "the text beside the tool calls" if message.tool_calls else "the text"
    for name, num_calls in Counter(call.name for call in message.tool_calls).items():
        if learnt.count(name) < num_calls + content.count(name):
            return f"a call of {name!r}"
    return None


def _add_turn(drafts: list[_Draft], prompt: str, turn: str, special: SpecialTokens) -> str:
    """Add one turn, and return what is learned: up to its end token, no later text."""
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
    return learnt


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


def _render_at(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> Callable[..., Any]:
    """Return the function that renders with the template, whose clock is stopped at `moment`.

    With a clock that goes on, no training could be resumed on another day with the same tokens.
    """
    return partial(tokenizer.apply_chat_template, tokenize=False, strftime_now=moment.strftime)


def _texts(
    render: Callable[..., Any],
    conversations: Sequence[list[dict[str, Any]]],
    offered: Sequence[Tools],
    *,
    is_prompt: bool,
    names: Sequence[str],
) -> list[str]:
    """Render all conversations, those with the same tools in one call; `names` are for errors."""
    texts = [""] * len(conversations)
    together: dict[str, list[int]] = {}
    for number, tools in enumerate(offered):
        together.setdefault(json.dumps(tools), []).append(number)

    def rendered(numbers: Sequence[int], tools: Tools) -> list[str]:
        try:
            return render(
                [conversations[number] for number in numbers],
                tools=list(tools) or None,
                add_generation_prompt=is_prompt,
            )
        except REFUSALS as error:
            if len(numbers) > 1:
                return [text for number in numbers for text in rendered([number], tools)]
            roles = ", ".join(message["role"] for message in conversations[numbers[0]])
            raise ConfigError(
                f"{names[numbers[0]]}: the model's chat template refuses a conversation of "
                f"{roles}: {error}; change or remove it, or set chat_template to a template that "
                "accepts it"
            ) from error

    for numbers in together.values():
        tools = offered[numbers[0]]
        found = rendered(numbers, tools)
        if tools and found[0] == rendered(numbers[:1], ())[0]:
            raise ConfigError(
                "the conversations have tools, but the model's chat template leaves them out, so "
                "the model would learn to call what it was never offered; set chat_template to a "
                "template that shows them, or remove the column `tools`"
            )
        for number, text in zip(numbers, found, strict=True):
            texts[number] = text
    return texts


def _text(
    render: Callable[..., Any],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Render one conversation."""
    return render(list(messages), tools=list(tools) or None)
