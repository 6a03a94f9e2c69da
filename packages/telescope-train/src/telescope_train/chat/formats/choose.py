"""Choose the parsers for a model: by its chat template, or by name from the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from telescope_core.base.errors import unknown_name
from telescope_core.parsers.tool_calls import CallText
from telescope_train.chat.formats import (
    gemma4,
    harmony,
    kimi,
    listed,
    pythonic,
    tagged,
    thinking,
)
from telescope_train.chat.formats.reply import Calls, ReasoningParser, ToolCallParser, ToolSchemas

AUTO = "auto"
Parser = TypeVar("Parser", ToolCallParser, ReasoningParser)


def _all_text(text: str, tools: ToolSchemas) -> Calls:
    return Calls(text)


NO_CALLS = ToolCallParser(name="none", read=_all_text)
_TOOL_CALLS = (
    (harmony.HARMONY, ("<|channel|>", "<|call|>")),
    (listed.DEEPSEEK, (listed.DEEPSEEK.marks[2],)),
    (listed.MISTRAL, ("[TOOL_CALLS]",)),
    (listed.COMMAND_R, ("<|START_ACTION|>",)),
    (kimi.KIMI_K2, ("<|tool_call_argument_begin|>",)),
    (kimi.KIMI_K3, ("<|open|>", "<|sep|>")),
    (gemma4.GEMMA4, ("<|tool_call>",)),
    (tagged.DEEPSEEK_V32, ("\uff5cDSML\uff5c",)),
    (tagged.MINIMAX_M2, ("minimax:tool_call",)),
    (tagged.SEED_OSS, ("seed:tool_call", "<function=")),
    (tagged.QWEN3_CODER, ("<function=", "<parameter=")),
    (tagged.FUNCTIONARY, ("<function=", "</function>")),
    (tagged.MINICPM5, ("<function name=", "<param name=")),
    (tagged.GLM45, ("<arg_key>",)),
    (listed.NEMOTRON, ("<TOOLCALL>",)),
    (listed.TOOL_CALLS, ("<tool_calls>",)),
    (tagged.HERMES, ("<tool_call>",)),
    (listed.PHI4, ("<|tool_call|>",)),
    (listed.PHI4, ("functools[",)),
    (listed.GRANITE_FC, ("<function_call>",)),
    (listed.INTERNLM, ("<|action_start|>", "<|plugin|>")),
    (listed.GIGACHAT, ("<|function_call|>",)),
    (pythonic.LFM2, ("<|tool_list_start|>",)),
    (pythonic.LFM2, ("<|tool_call_start|>",)),
    (pythonic.LFM2, ("List of tools: [", "keep_past_thinking")),
    (pythonic.PYTHONIC, ("[func_name1(",)),
    (pythonic.PYTHONIC, ("tool_call.name + '('",)),
    (listed.LLAMA4_JSON, ("<|header_start|>", '"parameters": ')),
    (listed.XLAM, ('[{"name": "tool_call_name"',)),
    (listed.LLAMA3_JSON, ("<|python_tag|>",)),
    (listed.LLAMA3_JSON, ("<|eot_id|>", "ipython")),
)
"""Each parser with texts that a template of its family contains. The first that fits is used."""
_REASONING = (
    (harmony.HARMONY_REASONING, ("<|channel|>", "analysis")),
    (thinking.COMMAND_THINK, ("<|START_THINKING|>",)),
    (thinking.MISTRAL_THINK, ("[THINK]",)),
    (thinking.KIMI_K3_THINK, ("<|open|>", "<|sep|>")),
    (thinking.GEMMA4_THINK, ("<|channel>thought", "<channel|>")),
    (thinking.SEED_THINK, ("seed:think",)),
    (thinking.MINIMAX_M3_THINK, ("mm:think",)),
    (thinking.APRIEL_THINK, ("[BEGIN FINAL RESPONSE]",)),
    (thinking.THINK, ("</think>",)),
)
TOOL_CALL_PARSERS = {one.name: one for one in (NO_CALLS, *(one for one, _ in _TOOL_CALLS))}
REASONING_PARSERS = {
    one.name: one for one in (thinking.NO_REASONING, *(one for one, _ in _REASONING))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A sampled text, separated into its parts."""

    content: str
    reasoning: str
    calls: tuple[CallText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The parsers for the replies of one model."""

    tool_calls: ToolCallParser
    reasoning: ReasoningParser

    @property
    def marks(self) -> frozenset[str]:
        """The special tokens that the parsers look for."""
        return frozenset((*self.tool_calls.marks, *self.reasoning.marks))

    def opens_thinking(self, generation_prompt: str) -> bool:
        """Return whether the prompt ends within the model's thinking."""
        opening = self.reasoning.opening
        return bool(opening) and generation_prompt.rstrip().endswith(opening)

    def forbids_thinking(self, generation_prompt: str) -> bool:
        """Return whether the prompt ends the thinking before it has begun."""
        closing = self.reasoning.closing
        return bool(closing) and generation_prompt.rstrip().endswith(closing)

    def marks_alike(self, one: str, other: str) -> bool:
        """Return whether both texts contain marks of thinking, or neither.

        If a template removes an empty block of thinking, it shows a different turn.
        """
        marks = filter(None, (self.reasoning.opening, self.reasoning.closing))
        return all((mark in one) == (mark in other) for mark in marks)

    def parse(
        self,
        text: str,
        *,
        tools: ToolSchemas = (),
        opened: bool = False,
        margins: tuple[str, str] = ("", ""),
    ) -> ParsedReply:
        """Separate the parts of `text`; `opened`: the prompt has begun the thinking.

        `margins`: white space around an answer that does not belong to it.
        Without tools there are no calls. Text that looks like a call stays in the content, where
        an environment that describes its tools in words looks for it.
        """
        thought = self.reasoning.split(self.reasoning.opening + text if opened else text)
        calls = Calls(thought.rest)
        if tools or self.tool_calls.is_envelope:
            calls = self.tool_calls.read(thought.rest, tools)
        content = calls.content.removeprefix(margins[0]).removesuffix(margins[1])
        return ParsedReply(content=content, reasoning=thought.reasoning, calls=calls.calls)


def choose_format(
    template: str, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ReplyFormat:
    """Return the named parsers, or those that fit the text of the chat template."""
    return ReplyFormat(
        tool_calls=_chosen(
            "tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS, _fitting(template, _TOOL_CALLS)
        ),
        reasoning=_chosen(
            "reasoning_parser", reasoning_parser, REASONING_PARSERS, _fitting(template, _REASONING)
        ),
    )


def _chosen(setting: str, name: str, known: Mapping[str, Parser], fitting: Parser | None) -> Parser:
    if name == AUTO:
        return fitting if fitting is not None else known["none"]
    if name not in known:
        raise unknown_name(setting, name, (AUTO, *known))
    return known[name]


def _fitting(template: str, families: Sequence[tuple[Parser, tuple[str, ...]]]) -> Parser | None:
    return next((one for one, signs in families if all(sign in template for sign in signs)), None)
