"""Decode the replies of a chat endpoint; raises EndpointError that says what is wrong with one.

Only the fields that are used are decoded, directly into typed structs. Token ids and log-probs
become arrays, so that no object per token outlives the call.
"""

import re
from collections.abc import Sequence
from typing import Literal, TypeVar, cast
from uuid import uuid4

import msgspec

from telescope_core.base.chains import sampled_tokens
from telescope_core.base.errors import NOTHING_SPENT, EndpointError, SpentTokens
from telescope_core.base.messages import without_halves
from telescope_core.base.types import Completion, FinishReason, Message, ToolCall
from telescope_core.chat.http import is_passing, quote

Expected = TypeVar("Expected")
_FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "length": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    None: "stop",
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    """JSON text inside a string, or, from some endpoints, the object itself."""


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    type: str | None = None
    id: str | None = None


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: "str | list[_Part] | None" = None
    refusal: str | None = None


class _ReasoningDetail(msgspec.Struct):
    text: str | None = None
    summary: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[_ReasoningDetail] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    """The older form of a single call, before `tool_calls`."""


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    index: object = None


class _Failed(msgspec.Struct):
    """A reply, or one of its choices, that holds an error in place of content."""

    error: msgspec.Raw = msgspec.Raw(b"null")
    choices: "list[_Failed] | None" = None
    index: object = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Reply(msgspec.Struct, frozen=True):
    choices: Sequence[_Choice]
    usage: object = None
    system_fingerprint: msgspec.Raw = msgspec.Raw(b"null")


class _PassedChoice(_Choice):
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _PassedReply(_Reply, frozen=True):
    choices: Sequence[_PassedChoice]


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _TokenChoice(_Choice):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _TokenReply(_Reply, frozen=True):
    choices: Sequence[_TokenChoice]
    prompt_token_ids: list[int] | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_REPLY = msgspec.json.Decoder(_PassedReply)
_TOKEN_REPLY = msgspec.json.Decoder(_TokenReply)
_FAILED = msgspec.json.Decoder(_Failed)
_ERROR = msgspec.json.Decoder(_Error)
_MODELS = msgspec.json.Decoder(_Models | list[_Model])
_WEIGHTS = re.compile(rb'"weights-(\d{1,9})-(\d{1,9})"')
"""The fingerprint that a gateway of ours sends: the oldest and the newest version of the weights
that the answer was sampled from."""
_MOST_DIGITS = 15
"""Digits of the largest number of tokens that is believed."""
AnyChoice = TypeVar("AnyChoice", bound=_Choice)
Placed = TypeVar("Placed", bound=_Choice | _Failed)


def read_completion(content: bytes, *, where: str) -> Completion:
    """Return the first choice of a reply without token ids; `where` is the URL for errors."""
    spent = None
    try:
        reply = _decode(_REPLY, content, "a chat completion", where)
        prompt = _count(reply.usage, "prompt_tokens")
        written = _count(reply.usage, "completion_tokens")
        if prompt is not None and written is not None:
            spent = SpentTokens(prompt, written)
        choice = _checked(reply.choices, content, where)
        message = _message(choice.message, where)
    except EndpointError as error:
        # A refusal that comes with status 200 used nothing, like any other.
        if spent is not None or not (error.status or 0) >= 400:
            error.spent = spent
        raise
    num_prompt, num_written = spent or NOTHING_SPENT
    weights = _WEIGHTS.fullmatch(bytes(reply.system_fingerprint))
    logprobs = bytes(choice.logprobs).decode(errors="replace")
    return Completion(
        message=message,
        finish_reason=_finish_reason(choice),
        num_prompt_tokens=num_prompt,
        num_completion_tokens=num_written,
        is_counted=spent is not None,
        num_cached_tokens=_part_of(num_prompt, reply.usage, "prompt", "cached_tokens"),
        num_reasoning_tokens=_part_of(num_written, reply.usage, "completion", "reasoning_tokens"),
        oldest_version=int(weights[1]) if weights else 0,
        newest_version=int(weights[2]) if weights else 0,
        logprobs_json="" if logprobs == "null" else logprobs,
    )


def _part_of(total: int, usage: object, kind: str, name: str) -> int | None:
    """Return a number in the details of the usage; None for what is no part of `total`."""
    found = _count(_at(usage, f"{kind}_tokens_details"), name)
    return None if found is None or found > total else found


def _at(usage: object, name: str) -> object:
    return cast(dict[str, object], usage).get(name) if isinstance(usage, dict) else None


def _count(usage: object, name: str) -> int | None:
    """Return a number of tokens in the usage of a reply; None for what is no such number."""
    value = _at(usage, name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < _MOST_DIGITS:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value) if 0 <= value < 10**_MOST_DIGITS else None


def read_token_completion(content: bytes, *, where: str) -> Completion:
    """Return the first choice with its token ids and exactly one log-prob per completion id."""
    reply = _decode(_TOKEN_REPLY, content, "a chat completion with tokens", where)
    choice = _checked(reply.choices, content, where)
    prompt_ids, token_ids = reply.prompt_token_ids or [], choice.token_ids or []
    entries = (choice.logprobs and choice.logprobs.content) or []
    if not prompt_ids or len(entries) != len(token_ids):
        raise EndpointError(
            f"{where} answered with {len(prompt_ids)} prompt ids, {len(token_ids)} completion ids "
            f"and {len(entries)} log-probs; expected prompt ids, and one log-prob for each "
            "completion id, as vLLM returns them for return_token_ids and logprobs"
        )
    try:
        tokens = sampled_tokens(prompt_ids, token_ids, [entry.logprob for entry in entries])
    except OverflowError as error:
        raise EndpointError(f"{where} answered with ids that no tokenizer has: {error}") from None
    return Completion(
        message=_message(choice.message, where),
        finish_reason=_finish_reason(choice),
        num_prompt_tokens=len(prompt_ids),
        num_completion_tokens=len(token_ids),
        tokens=tokens,
    )


def trouble_in(content: bytes, *, where: str) -> EndpointError | None:
    """Return the error of a busy or broken endpoint that stands in place of a reply, or None.

    Routers that ask other endpoints report theirs like that, with status 200.
    """
    # Inside a text, the quotation marks would be escaped.
    if b'"error"' not in content or b'"finish_reason"' in content:
        return None
    error = _reported(content, where)
    return error if error is not None and is_passing(error.status or 0) else None


def read_models(content: bytes, *, where: str) -> list[str]:
    """Return the ids in a reply that lists models."""
    found = _decode(_MODELS, content, "a list of models", where)
    return [model.id for model in (found.data if isinstance(found, _Models) else found)]


def _decode(
    decoder: msgspec.json.Decoder[Expected], content: bytes, expected: str, where: str
) -> Expected:
    try:
        str(content, "utf-8")  # which is not checked in what is kept raw
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        if (reported := _reported(content, where)) is not None:
            raise reported from None
        problem = f"with JSON that is not {expected} ({error})"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (mended := without_halves(content)) is not None:
            return _decode(decoder, mended, expected, where)
        problem = f"with something that is not complete JSON ({error})"
    raise EndpointError(
        f"{where} answered {problem}: {quote(content) or 'nothing'!r}; "
        "check that this is the base URL of an OpenAI-compatible endpoint (it usually ends in /v1)"
    )


def _checked(choices: Sequence[AnyChoice], content: bytes, where: str) -> AnyChoice:
    """Return the first choice; raises EndpointError if there is none, or if it is an error."""
    if not choices:
        raise _reported(content, where) or EndpointError(
            f"{where} answered with a chat completion without choices: {quote(content)!r}; "
            "check the server's log"
        )
    choice = _first(choices)
    if choice.finish_reason not in _FINISH_REASONS:
        raise _reported(content, where) or EndpointError(
            f"{where} ended a completion with finish_reason {choice.finish_reason!r}; "
            f"expected one of {', '.join(name for name in _FINISH_REASONS if name)}"
        )
    return choice


def _first(choices: Sequence[Placed]) -> Placed:
    """Return the choice of index 0, wherever it stands; without indices, the one that is first."""
    return next((one for one in choices if one.index == 0), choices[0])


def _reported(content: bytes, where: str) -> EndpointError | None:
    """Return the error that an endpoint reports in a reply with status 200; None without one."""
    try:
        reply = _FAILED.decode(content)
    except msgspec.DecodeError:  # of another form, or cut after what was not expected
        return None
    places = [reply, _first(reply.choices)] if reply.choices else [reply]
    raw = next((one.error for one in places if bytes(one.error) != b"null"), None)
    if raw is None:
        return None
    try:
        error = _ERROR.decode(raw)
    except msgspec.ValidationError:  # a text, or a form of its own
        error = _Error()
    said = error.message or quote(bytes(raw))
    code = "" if error.code is None else str(error.code)
    return EndpointError(
        f"{where} answered with status 200 and the error{code and ' '}{code}: {said}",
        status=int(code) if re.fullmatch("[45][0-9]{2}", code) else None,
        answer=said,
    )


def _finish_reason(choice: _Choice) -> FinishReason:
    reason = _FINISH_REASONS[choice.finish_reason]
    # Some servers say "stop" where the turn calls tools. A call that was cut stays cut.
    has_calls = choice.message.tool_calls or choice.message.function_call
    return "tool_calls" if reason == "stop" and has_calls else reason


def _message(message: _Message, where: str) -> Message:
    parts = message.content if isinstance(message.content, list) else []
    for part in parts:
        if part.text is None and part.thinking is None and part.refusal is None:
            raise EndpointError(
                f"{where} answered with content of type {part.type!r}; expected text, thinking or "
                "a refusal: name a model that answers with text"
            )
    said = message.content if isinstance(message.content, str) else _joined(parts, "text")
    details = "".join(one.text or one.summary or "" for one in message.reasoning_details or ())
    thinking = message.reasoning_content or message.reasoning or _joined(parts, "thinking")
    calls = message.tool_calls or []
    if message.function_call is not None and not calls:
        calls = [_ToolCall(function=message.function_call)]
    for call in calls:
        if call.function is None and call.type not in (None, "", "function"):
            raise EndpointError(
                f"{where} answered with a call of type {call.type!r:.80}; expected calls of type "
                "'function': offer functions alone, or name a model that calls them"
            )
    ids = [call.id for call in calls]
    return Message(
        role="assistant",
        content=said,
        reasoning=thinking or details,
        refusal=message.refusal or _joined(parts, "refusal"),
        # Without a name it is malformed, which the policy is told by its tools. A result names
        # its call by the id, so no two calls of a conversation may share one; an id that is made
        # here has the form of the strictest templates.
        tool_calls=tuple(
            ToolCall(
                id=call.id if call.id and ids.count(call.id) == 1 else uuid4().hex[:9],
                name=(call.function and call.function.name) or "",
                arguments=_arguments(call) or "{}",
            )
            for call in calls
        ),
    )


def _joined(parts: Sequence[_Part], kind: Literal["text", "thinking", "refusal"]) -> str:
    values = [getattr(part, kind) or "" for part in parts]
    return "".join(one if isinstance(one, str) else _joined(one, "text") for one in values)


def _arguments(call: _ToolCall) -> str:
    """Return the arguments as JSON text; empty for none."""
    raw = b"null" if call.function is None else bytes(call.function.arguments)
    if raw.startswith(b'"'):
        return msgspec.json.decode(raw, type=str)
    return "" if raw == b"null" else raw.decode()
