"""Find the token that ends answers in a chat template, and whether the model ends with it. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from telescope_core.base.types import Message
from telescope_train.chat.special_tokens import SpecialTokens

_USER = Message(role="user", content="What is new in Tamworth?")
_ANSWER = Message(role="assistant", content="Nothing new there.")
_AGAIN = Message(role="user", content="And in Oxley?")
_SHOWN = 40


class TurnEnd(NamedTuple):
    """Text and tokens that a template writes after an answer."""

    is_known: bool
    """Whether one of the tokens ends a completion."""
    token: str
    """The first special token; empty = there is none."""
    token_id: int | None
    text: str
    """The text up to the next message."""


def turn_end(text: Callable[[Sequence[Message], bool], str], special: SpecialTokens) -> TurnEnd:
    """Return how the template ends answers.

    `text` renders messages, with a generation prompt or without.
    """
    # A template may write the end token behind the last turn alone, or behind earlier ones.
    last = text([_USER, _ANSWER], False).partition(_ANSWER.content)[2]
    earlier = text([_USER, _ANSWER, _AGAIN], True).partition(_ANSWER.content)[2]
    earlier = earlier.partition(_AGAIN.content)[0]
    if special.first_end(last) is not None:
        return TurnEnd(True, "", None, last)
    for behind in (last, earlier):
        if (found := special.first_special(behind)) is not None:
            return TurnEnd(found[0] in special.end_ids, found[1], found[0], behind)
    if special.first_end(earlier) is not None:
        return TurnEnd(True, "", None, earlier)
    return TurnEnd(False, "", None, last or earlier)


def wrong_end(found: TurnEnd, special: SpecialTokens) -> str | None:
    """Return a remedy if answers end with a token that does not end the model's; else None."""
    if found.is_known or found.token_id is None:
        return None
    known = special.ends_text
    return (
        f"the chat template ends an answer with {found.token!r} (token {found.token_id}), which is "
        f"no end token of the model ({known}), so no answer would end before max_tokens; add "
        f"{found.token_id} to eos_token_id in generation_config.json in the model's folder (in a "
        "copy of it, if it is on the Hub), or set chat_template to a template that ends answers "
        "with an end token of the model"
    )


def no_end(found: TurnEnd, special: SpecialTokens) -> str | None:
    """Return a remark if no token ends answers; else None."""
    if found.is_known or found.token_id is not None:
        return None
    return (
        f"the chat template writes no end token behind an answer, but {found.text[:_SHOWN]!r}: a "
        "model that learns such answers does not learn to stop, and writes on until max_tokens "
        "or a text of stop; set chat_template to a template that ends answers with an end token "
        f"of the model ({special.ends_text})"
    )
