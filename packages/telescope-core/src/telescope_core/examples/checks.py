"""Check the examples that an author's code returns, before any of them is played.

Numbers as ids and answers become text, because every reader compares text. Anything else that
could not be shown to a policy, compared or saved is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any, cast, get_args

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.images import why_unusable
from telescope_core.base.messages import message_to_record
from telescope_core.base.types import Example, Message, Role

_ROLES = get_args(Role)
_LONGEST = 80
IN_INFO = "; several answers, or a structure, belong in info"


def checked_example(value: object, *, where: str) -> Example:
    """Return `value` as an example that can be played and saved; `where` names it in errors."""
    if not isinstance(value, Example):
        raise EnvironmentLoadError(
            f"{where} must be an Example, got {_shown(value)}; write: "
            "Example(id=..., prompt=..., answer=...)"
        )
    own_id, prompt, answer, info = cast(
        Sequence[Any], (value.id, value.prompt, value.answer, value.info)
    )
    checked_id = as_text(own_id, f"{where}: id")
    where = f"{where} (id {checked_id!r})"
    if not checked_id:
        raise EnvironmentLoadError(
            f"{where}: id is empty; give each example an id that is the same in every process, "
            "such as a hash of its prompt"
        )
    answer = as_text("" if answer is None else answer, f"{where}: answer", advice=IN_INFO)
    cluster = as_text(cast(Any, value.cluster), f"{where}: cluster")
    prompt = _checked_prompt(prompt, where)
    _require_info(info, where)
    said = prompt if isinstance(prompt, str) else [message_to_record(one) for one in prompt]
    for name, part in (("prompt", said), ("answer", answer), ("info", info)):
        require_whole(json.dumps(part, ensure_ascii=False), f"{where}: {name}")
    parts = {"id": checked_id, "prompt": prompt, "answer": answer, "cluster": cluster}
    is_same = all(getattr(value, name) == part for name, part in parts.items())
    return value if is_same else replace(value, **cast(Any, parts))


def checked_messages(values: Sequence[object], *, where: str) -> list[Message]:
    """Return `values` if each is a message with a known role and text."""
    for value in values:
        if not isinstance(value, Message):
            raise EnvironmentLoadError(
                f"{where} must be Message objects, got {_shown(value)}; write: "
                'Message(role="user", content=...)'
            )
        role, content = cast(Any, value.role), cast(Any, value.content)
        if role not in _ROLES:
            raise EnvironmentLoadError(
                f"{where}: a message has the role {role!r}; the roles are {', '.join(_ROLES)}"
            )
        if not isinstance(content, str):
            raise EnvironmentLoadError(
                f"{where}: the content of a {role} message must be text, got {_shown(content)}"
                f"{_decode_hint(content)}"
            )
        if wrong := why_unusable(value):
            raise EnvironmentLoadError(f"{where}: in a {role} message, {wrong}")
        calls = (one.arguments for one in value.tool_calls)
        for text in cast(Sequence[object], (content, value.reasoning, *calls)):
            if isinstance(text, str):
                require_whole(text, f"{where}: a {role} message")
    return cast(list[Message], list(values))


def as_text(value: object, where: str, *, advice: str = "") -> str:
    """Return an id or an answer as text; `where` names it in errors, such as `...: answer`."""
    if isinstance(value, str):
        return value
    # A value that differs from itself is NaN, which tables use for missing values.
    if not isinstance(value, bool) and isinstance(value, Real | Decimal) and value == value:
        return str(value)
    raise EnvironmentLoadError(
        f"{where} must be text or a number, got {_shown(value)}{_decode_hint(value) or advice}"
    )


def _checked_prompt(prompt: object, where: str) -> Any:
    if isinstance(prompt, str):
        return prompt
    given = prompt  # the check below narrows the type of `prompt` to lists of unknown items
    turns = cast(Sequence[object], prompt) if isinstance(prompt, list | tuple) else ()
    if turns:
        return tuple(checked_messages(turns, where=f"{where}: the items of prompt"))
    raise EnvironmentLoadError(
        f"{where}: prompt must be text or a list of Message, got {_shown(given)}"
        f"{_decode_hint(given)}"
    )


def _require_info(info: object, where: str) -> None:
    if not isinstance(info, Mapping):
        raise EnvironmentLoadError(f"{where}: info must be a dict, got {_shown(info)}")
    for name, value in cast(Mapping[object, object], info).items():
        if not isinstance(name, str):
            raise EnvironmentLoadError(f"{where}: info has the key {name!r}; keys must be text")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise EnvironmentLoadError(
                f"{where}: info[{name!r}] is {_shown(value)}, which has no place in JSON ({error});"
                " use text, numbers, lists and dicts, or build it from them when it is needed"
            ) from None
        if _is_too_wide(value):
            raise EnvironmentLoadError(
                f"{where}: info[{name!r}] is {_shown(value)}, which has a whole number that does "
                "not fit 64 bits; write it as text"
            )


def _is_too_wide(value: object) -> bool:
    """Return whether `value` has an integer too large to be sent from a worker to the host."""
    if isinstance(value, int):
        return not -(2**63) <= value < 2**64
    if isinstance(value, Mapping):
        value = [*cast(Mapping[object, object], value).values()]
    if isinstance(value, list | tuple):
        return any(_is_too_wide(one) for one in cast(Sequence[object], value))
    return False


def require_whole(text: str, what: str) -> None:
    """Refuse half of a surrogate pair, which JSON can hold but no file or tokenizer can.

    `what` names the text in the error.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentLoadError(
            f"{what} has half of a surrogate pair, {error.object[error.start]!a}; write the whole "
            "character, or replace the half: text.encode(errors='replace').decode()"
        ) from None


def _decode_hint(value: object) -> str:
    return "; decode it: value.decode()" if isinstance(value, bytes) else ""


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{text} ({type(value).__name__})"
