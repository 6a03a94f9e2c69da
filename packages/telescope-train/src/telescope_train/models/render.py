"""Conversations to tokens through the model's own chat template, and which of them to learn."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.errors import ConfigError
from telescope_core.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedConversation:
    """One conversation as tokens. L = its length."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """[L] True for what the assistant wrote, its end token included."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]
) -> list[RenderedConversation]:
    """Render whole conversations, each ending with an assistant message.

    A template that writes an assistant's turn differently once it is history cannot be learnt
    from as one sequence: ConfigError.
    """
    turns = [
        (number, end)
        for number, messages in enumerate(conversations)
        for end, message in enumerate(messages)
        if message.role == "assistant"
    ]
    plain = [[template_message(message) for message in messages] for messages in conversations]
    prompts = _token_ids(tokenizer, [plain[n][:end] for n, end in turns], is_prompt=True)
    wholes = _token_ids(tokenizer, [plain[n][: end + 1] for n, end in turns], is_prompt=False)
    found: list[RenderedConversation | None] = [None] * len(conversations)
    for (number, _), prompt, whole in zip(turns, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:
            raise ConfigError(
                "the chat template does not continue its own generation prompt: the turn "
                f"{tokenizer.decode(whole)!r} does not start with {tokenizer.decode(prompt)!r}; "
                "set chat_template to one that does"
            )
        found[number] = _extend(found[number], prompt, whole, tokenizer.eos_token_id)
    assert all(found), "a conversation without an assistant message cannot be learnt from"
    return [rendered for rendered in found if rendered is not None]


def _extend(
    before: RenderedConversation | None, prompt: list[int], whole: list[int], end_id: int | None
) -> RenderedConversation:
    """Add one turn: it is learnt up to its end token; what a template writes after that is not."""
    turn = whole[len(prompt) :]
    num_learnt = turn.index(end_id) + 1 if end_id in turn else len(turn)
    mask = np.zeros(len(whole), dtype=np.bool_)
    mask[len(prompt) : len(prompt) + num_learnt] = True
    token_ids = np.array(whole, dtype=np.int32)
    if before is not None:
        known = len(before.token_ids)
        if not np.array_equal(token_ids[:known], before.token_ids):
            raise ConfigError(
                "the chat template rewrites earlier turns when later ones follow; "
                "set chat_template to one that only appends"
            )
        mask[:known] = before.mask
    return RenderedConversation(token_ids=token_ids, mask=mask)


def _token_ids(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, Any]]],
    *,
    is_prompt: bool,
) -> list[list[int]]:
    """All in one call: a template is compiled, and the tokenizer entered, once."""
    texts = tokenizer.apply_chat_template(
        conversations, tokenize=False, add_generation_prompt=is_prompt
    )
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call the thinking in a message."""


def template_text(tokenizer: Any) -> str:
    """Return the chat template of `tokenizer`; of one that has several, all of them."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())


def template_message(
    message: Message, template: str = "", *, wrap_broken: bool = False
) -> dict[str, Any]:
    """Return `message` as chat templates expect it: the arguments of a tool call as an object.

    Arguments that are no JSON object stay the text that the policy wrote, or with `wrap_broken`
    become an object that holds it, for templates that go through the keys. The thinking has the
    name that `template` reads it by.
    """
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        names = [name for name in _REASONING_NAMES if _reads(template, name)]
        plain[names[0] if names else _REASONING_NAMES[0]] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call, wrap_broken)}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _function(call: ToolCall, wrap_broken: bool) -> dict[str, object]:
    arguments = _arguments(call.arguments)
    if wrap_broken and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    return {"name": call.name, "arguments": arguments}


def _reads(template: str, name: str) -> bool:
    """Whether the template takes `name` from a message: as an attribute, or by a quoted key."""
    return re.search(rf"\.{name}\b|['\"]{name}['\"]", template) is not None


def _arguments(text: str) -> object:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair cannot be encoded: ValueError
        return text
    return value if isinstance(value, dict) else text
