"""Build the gateway's answers in the form of OpenAI's chat API. Pure."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from telescope_core.base.types import Completion, Message, ToolCall

DONE = b"data: [DONE]\n\n"


def reply_json(completion: Completion, *, model: str) -> dict[str, Any]:
    """Return the body of an answer without streaming."""
    choice = {
        "index": 0,
        "message": _message(completion.message),
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }
    head = _head(completion, "chat.completion", model)
    return {**head, "choices": [choice], "usage": _usage(completion)}


def event_stream(completion: Completion, *, model: str, include_usage: bool) -> bytes:
    """Return the same answer as the events of a stream, including its end mark."""
    head = _head(completion, "chat.completion.chunk", model)
    if include_usage:
        head["usage"] = None
    chunks = [
        {
            **head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
        for delta, reason in _deltas(completion)
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(completion)})
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + DONE


def _head(completion: Completion, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"weights-{completion.oldest_version}-{completion.newest_version}",
    }


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": "assistant",
        # In a turn of calls alone, the content is null, as in OpenAI's API.
        "content": message.content or (None if message.tool_calls else ""),
    }
    # No null in place of a missing field: some clients send what they do not know back to us.
    if message.refusal:
        fields["refusal"] = message.refusal
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    return fields


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _deltas(completion: Completion) -> Iterator[tuple[dict[str, Any], str | None]]:
    message = completion.message
    yield {"role": "assistant", "content": None if message.tool_calls else ""}, None
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}, None
    if message.content:
        yield {"content": message.content}, None
    if message.refusal:
        yield {"refusal": message.refusal}, None
    for number, call in enumerate(message.tool_calls):
        opening = {"index": number, "id": call.id, "type": "function"}
        yield (
            {"tool_calls": [{**opening, "function": {"name": call.name, "arguments": ""}}]},
            None,
        )
        arguments = {"index": number, "function": {"arguments": call.arguments}}
        yield {"tool_calls": [arguments]}, None
    yield {}, completion.finish_reason


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_completion_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_completion_tokens,
    }
