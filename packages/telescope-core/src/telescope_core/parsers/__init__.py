"""Read answers out of text: boxes, XML tags, code blocks, thinking and JSON.

All are pure functions, and their time is linear in the length of the text.
"""

from telescope_core.parsers.texts import (
    CodeBlock,
    Thinking,
    after_thinking,
    as_model,
    boxed_answer,
    code_block,
    code_blocks,
    follows_xml_format,
    json_values,
    last_json,
    split_thinking,
    without_thinking,
    xml_fields,
    xml_tag,
)

__all__ = [
    "CodeBlock",
    "Thinking",
    "after_thinking",
    "as_model",
    "boxed_answer",
    "code_block",
    "code_blocks",
    "follows_xml_format",
    "json_values",
    "last_json",
    "split_thinking",
    "without_thinking",
    "xml_fields",
    "xml_tag",
]
