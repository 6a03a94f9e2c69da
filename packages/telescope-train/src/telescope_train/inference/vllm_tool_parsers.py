"""Choose vLLM's parser of tool calls for a chat endpoint, by the model's chat template.

Runs read the calls in replies themselves, from tokens (`chat.formats`). This is for clients that
ask the endpoint of a server for calls, as evals of a model folder do: vLLM refuses every request
with tools unless it was told how the model writes calls.
"""

from telescope_train.chat.formats import choose_format

_SAME_NAME = (
    *("deepseek_v32", "gemma4", "gigachat3", "glm45", "granite-20b-fc", "hermes", "internlm"),
    *("kimi_k2", "kimi_k3", "lfm2", "llama3_json", "llama4_json", "minicpm5", "minimax_m2"),
    *("mistral", "phi4_mini_json", "pythonic", "qwen3_coder", "seed_oss", "xlam"),
)
"""Parsers that have the same name in vLLM."""
_NAME_THERE = {**{name: name for name in _SAME_NAME}, "harmony": "openai"}


def tool_call_arguments(template: str) -> tuple[str, ...]:
    """Return vLLM's arguments that let a model with `template` be offered tools.

    Nothing for a template that shows no tools, or whose calls vLLM has no reader for: then it
    refuses requests with tools, rather than to leave them out.
    """
    name = _NAME_THERE.get(choose_format(template).tool_calls.name)
    if name is None or "tools" not in template:
        return ()
    return ("--enable-auto-tool-choice", "--tool-call-parser", name)
