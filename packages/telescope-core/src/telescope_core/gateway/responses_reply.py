"""Build the gateway's answers in the form of OpenAI's Responses API. Pure."""

import base64
import secrets
import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from telescope_core.base.types import Completion
from telescope_core.gateway.responses_request import THINKING_MARK

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_json(completion: Completion, *, model: str) -> dict[str, Any]:
    """Return the body of an answer without streaming."""
    reason = _INCOMPLETE.get(completion.finish_reason)
    usage: dict[str, Any] = {
        "input_tokens": completion.num_prompt_tokens,
        # Its clients require these numbers, so 0 also stands for an unknown one.
        "input_tokens_details": {
            "cached_tokens": completion.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": completion.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.num_reasoning_tokens or 0},
        "total_tokens": completion.num_prompt_tokens + completion.num_completion_tokens,
    }
    return {
        **_begun(model),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(_items(completion)),
        "usage": usage if completion.is_counted else None,
    }


def response_events(whole: dict[str, Any]) -> bytes:
    """Return the answer of `response_json` as the events of a stream."""
    begun: dict[str, Any] = {
        **whole,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
    }
    begun["usage"] = None
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        events += [{**event, "output_index": index} for event in _of_item(item)]
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return b"".join(
        b"event: %s\ndata: %s\n\n"
        % (event["type"].encode(), msgspec.json.encode({**event, "sequence_number": number}))
        for number, event in enumerate(events)
    )


def _begun(model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
    }


def _items(completion: Completion) -> Iterator[dict[str, Any]]:
    message = completion.message
    number = secrets.token_hex(12)
    if message.reasoning:
        # Programs that keep no state at the endpoint send back this alone.
        packed = base64.b64encode(message.reasoning.encode(errors="replace")).decode()
        yield {
            "type": "reasoning",
            "id": f"rs_{number}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": message.reasoning}],
            "encrypted_content": f"{THINKING_MARK}{packed}",
            "status": "completed",
        }
    if message.content or message.refusal or not message.tool_calls:
        text: dict[str, Any] = {"type": "output_text", "text": message.content, "annotations": []}
        text["logprobs"] = _logprobs(completion)
        part = {"type": "refusal", "refusal": message.refusal} if message.refusal else text
        yield {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "content": [part],
            "status": "completed",
        }
    for place, call in enumerate(message.tool_calls):
        yield {
            "type": "function_call",
            "id": f"fc_{number}_{place}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _logprobs(completion: Completion) -> list[Any]:
    """Return the log-probs of the tokens of the text, whose form is that of the chat API."""
    try:
        match msgspec.json.decode(completion.logprobs_json or "null"):
            case {"content": list()} as found:
                return cast(dict[str, list[Any]], found)["content"]
            case _:
                return []
    except RecursionError:
        return []


def _of_item(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the stream events of one item of the output."""
    where = {"item_id": item["id"]}
    empty = {**item, "status": "in_progress"}
    more: dict[str, Any] = {}
    part: dict[str, Any] = {}
    if item["type"] == "function_call":
        kind, text, name = "response.function_call_arguments", item["arguments"], "arguments"
        empty["arguments"] = ""
    else:
        [part] = item["content"]
        kind = f"response.{part['type']}"
        name = "refusal" if part["type"] == "refusal" else "text"
        text = part[name]
        empty["content"] = []
        where["content_index"] = 0
    yield {"type": "response.output_item.added", "item": empty}
    if part:
        opened = {**part, name: ""}
        if "logprobs" in part:
            opened["logprobs"], more = [], {"logprobs": part["logprobs"]}
        yield {"type": "response.content_part.added", **where, "part": opened}
    yield {"type": f"{kind}.delta", **where, **more, "delta": text}
    ended = {"name": item["name"]} if item["type"] == "function_call" else more
    yield {"type": f"{kind}.done", **where, **ended, name: text}
    if part:
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "item": item}
