"""Build the gateway's answers in the form of Anthropic's Messages API. Pure."""

import hashlib
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from telescope_core.base.types import Completion, FinishReason, ToolCall
from telescope_core.gateway.anthropic_request import INVALID_JSON
from telescope_core.gateway.refusal import Refusal

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_json(completion: Completion, *, model: str) -> dict[str, Any]:
    """Return the body of an answer without streaming."""
    stopped_by = completion.stop_text
    return {
        **_head(model),
        "content": list(_blocks(completion)),
        "stop_reason": "stop_sequence" if stopped_by else _STOP_REASONS[completion.finish_reason],
        "stop_sequence": stopped_by or None,
        "usage": _usage(completion),
    }


def message_events(completion: Completion, *, model: str) -> bytes:
    """Return the same answer as the events of a stream."""
    whole = message_json(completion, model=model)
    begun: dict[str, Any] = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(whole["content"]):
        empty, deltas = _opened(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [
            {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
        ]
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    events.append({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    )


def error_json(refusal: Refusal) -> dict[str, Any]:
    """Return the body of the answer to a refused request."""
    kind = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        # Programs look for these words to know that they have to shorten their history.
        message = f"prompt is too long: {message}"
    error = {
        "type": _ERRORS.get(refusal.status, kind),
        "message": message,
        "details": {"error_code": refusal.code},
    }
    return {"type": "error", "error": error}


def _head(model: str) -> dict[str, Any]:
    name = f"msg_{secrets.token_hex(12)}"
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _usage(completion: Completion) -> dict[str, int]:
    # Its input tokens are those that were not in the cache.
    cached = completion.num_cached_tokens or 0
    return {
        "input_tokens": completion.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion.num_completion_tokens,
    }


def _blocks(completion: Completion) -> Iterator[dict[str, Any]]:
    message = completion.message
    if message.reasoning:
        # Programs drop thinking that has no signature, and nothing here has to be proved by one.
        signature = hashlib.sha256(message.reasoning.encode(errors="surrogatepass")).hexdigest()
        yield {"type": "thinking", "thinking": message.reasoning, "signature": signature}
    if text := message.content or message.refusal:
        yield {"type": "text", "text": text}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: ToolCall) -> msgspec.Raw:
    """Return the arguments of a call: the JSON object as written, or its text in `INVALID_JSON`."""
    written = call.arguments.strip() or "{}"
    try:
        value: object = msgspec.json.decode(written)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        value = None
    if isinstance(value, dict) and value.keys() != {INVALID_JSON}:
        return msgspec.Raw(written)
    return msgspec.Raw(msgspec.json.encode({INVALID_JSON: call.arguments}))


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without its content, and the pieces of content that follow it."""
    match block["type"]:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "text":
            return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            written = bytes(block["input"]).decode()
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
