"""Answers of a scripted policy that calls tools."""

import json

from telescope_core import Completion, Message, ToolCall


def calls(*called: tuple[str, object], text: str = "") -> Completion:
    """Return an answer that makes these calls; arguments that are a text stand as they are."""
    made = tuple(
        ToolCall(
            id=f"call-{number}",
            name=name,
            arguments=given if isinstance(given, str) else json.dumps(given),
        )
        for number, (name, given) in enumerate(called)
    )
    return Completion(
        message=Message(role="assistant", content=text, tool_calls=made),
        finish_reason="tool_calls",
        num_prompt_tokens=3,
        num_completion_tokens=2,
    )
