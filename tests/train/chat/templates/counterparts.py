"""Which published template each fixture stands for, and in which plays the two end differently.

The published ones are not part of this tree. `make test-templates` plays both and compares them
with this table, and the documentation shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_CALLS = ("system tools", "tools", "parallel", "text and a call", "thinking tools")


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The published template of a fixture's family."""

    name: str
    differs: tuple[str, ...] = ()
    """Plays that end differently with it."""

    @property
    def text(self) -> str:
        """What the documentation says of the comparison."""
        return f"differs in {', '.join(self.differs)}" if self.differs else "same in every play"


def _alike(name: str) -> Counterpart:
    return Counterpart(name=name)


COUNTERPARTS: Mapping[str, Counterpart] = {
    "Qwen2.5": _alike("Qwen-Qwen2.5-7B-Instruct"),
    "Qwen3, thinking": _alike("Qwen-Qwen3-0.6B"),
    "Qwen3, enable_thinking = false": _alike("Qwen-Qwen3-0.6B"),
    "Qwen3-Coder": _alike("Qwen3-Coder"),
    "Llama 3.1": _alike("meta-llama-Llama-3.1-8B-Instruct"),
    "Llama 3.2": _alike("meta-llama-Llama-3.2-3B-Instruct"),
    "Mistral v3": _alike("mistralai-Mistral-Nemo-Instruct-2407"),
    "Mistral v3, system message": _alike("mistralai-Mistral-Nemo-Instruct-2407"),
    "Mistral v7 and later (Tekken)": _alike("unsloth-mistral-Devstral-Small-2507"),
    "Mistral Small 3.2": _alike("Mistral-Small-3.2-24B-Instruct-2506"),
    "Gemma 2": _alike("google-gemma-2-2b-it"),
    "Gemma 4": _alike("google-gemma-4-31B-it-interleaved"),
    "Gemma 4, enable_thinking = true": _alike("google-gemma-4-31B-it-interleaved"),
    "DeepSeek-R1": Counterpart(name="deepseek-ai-DeepSeek-R1-Distill-Llama-8B", differs=_CALLS),
    "DeepSeek-V3.1, thinking = false": Counterpart(
        name="deepseek-ai-DeepSeek-V3.1", differs=_CALLS
    ),
    "DeepSeek-V3.1, thinking = true": Counterpart(
        name="deepseek-ai-DeepSeek-V3.1", differs=("multi", "system", *_CALLS)
    ),
    "LFM2.5": Counterpart(name="LFM2.5-8B-A1B", differs=("thinking", "thinking tools")),
    "Phi-3": _alike("microsoft-Phi-3.5-mini-instruct"),
    "gpt-oss": _alike("openai-gpt-oss-120b"),
    "Command R7B": Counterpart(
        name="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        differs=("multi", "system", "system tools", "thinking", "tools", "thinking tools"),
    ),
    "GLM-4.5": _alike("GLM-4.6"),
    "Seed-OSS": _alike("ByteDance-Seed-OSS"),
    "MiniMax-M2": _alike("MiniMax-M2"),
    "Kimi-K2": _alike("moonshotai-Kimi-K2"),
    "Kimi-K3": _alike("Kimi-K3"),
    "Functionary 3.1": _alike("meetkai-functionary-medium-v3.1"),
    "Apriel 1.6": _alike("Apriel-1.6-15b-Thinker-fixed"),
    "Reka-Edge": Counterpart(name="Reka-Edge", differs=("thinking", "thinking tools")),
    "Granite 3.3": Counterpart(name="ibm-granite-granite-3.3-2B-Instruct", differs=("thinking",)),
}
"""Name of a family in `newer_families` -> the published template."""


@dataclass(frozen=True, kw_only=True)
class Uncompared:
    """A family whose published template is not there to compare with."""

    words: tuple[str, ...]
    """What the name of its published template would have; `make test-templates` looks for them."""

    @property
    def text(self) -> str:
        """What the documentation says in place of a comparison."""
        return "not compared: not in the package"


UNCOMPARED: Mapping[str, Uncompared] = {
    "SmolLM (ChatML)": Uncompared(words=("SmolLM-", "SmolLM2", "chatml")),
    "Qwen3-Thinking-2507": Uncompared(words=("Thinking-2507",)),
    "Qwen3-Instruct-2507": Uncompared(words=("Instruct-2507",)),
    "Llama 4, pythonic": Uncompared(words=("llama-4", "llama4")),
    "Gemma 3": Uncompared(words=("gemma-3",)),
    "Phi-4": Uncompared(words=("phi-4",)),
    "Phi-4-mini": Uncompared(words=("phi-4",)),
    "Zephyr": Uncompared(words=("zephyr", "stablelm")),
    "SmolVLM, LLaVA-Next (text parts)": Uncompared(words=("SmolVLM", "Idefics", "llava")),
}
"""Name of a family that none of the published templates is of -> how it would be known."""
