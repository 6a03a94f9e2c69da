"""Test with short conversations what a chat template does to sampled turns. Pure.

If the template loses something, `proof` refuses it, separately for each use.

Some templates show an earlier turn differently from how it was sampled. Each such turn becomes a
separate training sample, which is exact, but its history is computed once more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import EnvironmentDescription, JsonValue, Message, ToolCall, Tools
from telescope_train.chat.formats import same_words
from telescope_train.chat.proof import PROBE_TOOLS, Use, keeps_text_with_calls, uses_declared
from telescope_train.chat.renderer import Renderer
from telescope_train.chat.tokenizer import appending_templates
from telescope_train.config.schema import TrainConfig

_SYSTEM = Message(role="system", content="Look up towns.")
_USER = Message(role="user", content="How is Oxley?")
_AGAIN = Message(role="user", content="And Wick?")
_CALL = ToolCall(id="PROBE1234", name="look_up_town", arguments='{"town": "Oxley", "days": 2}')
_RESULT = Message(role="tool", content="dry", tool_call_id=_CALL.id)
_THOUGHT = "I look it up."
_IMPLIED = {
    Use.SYSTEM: (Use.SYSTEM_IN_TURNS, Use.SYSTEM_WITH_TOOLS),
    Use.TURNS: (Use.SYSTEM_IN_TURNS,),
    Use.TOOLS: (Use.SYSTEM_WITH_TOOLS, Use.CALLS, Use.PARALLEL_CALLS, Use.TEXT_WITH_CALLS),
}
"""Refused use -> uses that are impossible without it, which need not be reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """The findings; None for parts of a conversation that the template cannot write at all."""

    tool_call_parser: str
    reasoning_parser: str
    takes_system: bool
    no_end: str | None
    """Remark for the case that no token ends an answer in the history; else None."""
    keeps_answers: bool | None
    """Whether an answer stays unchanged when the user writes again."""
    keeps_thinking: bool | None
    """Whether an answer with thinking stays unchanged when the user writes again."""
    keeps_calls: bool | None
    """Whether a call with its thinking stays unchanged when its result follows."""
    keeps_text_with_calls: bool | None
    """Whether later prompts show what the policy says beside a call. Where they do not, such a
    turn is a training sample of its own."""
    appending: str
    """The templates that only append and fit the model."""
    refused: Mapping[str, str]
    """Use of the template -> reason for refusing it as soon as it happens."""

    @property
    def text(self) -> str:
        """One line with the findings, for people."""
        kept = {"answers": self.keeps_answers, "thinking": self.keeps_thinking}
        if self.keeps_calls is not None:
            kept["tool calls"] = self.keeps_calls
        stay = [name for name, stays in kept.items() if stays]
        go = [name for name, stays in kept.items() if stays is False]
        parts = [f"thinking is read as {self.reasoning_parser}, calls as {self.tool_call_parser}"]
        if stay:
            parts.append(f"later turns keep {', '.join(stay)} as sampled")
        if go:
            parts.append(
                f"later turns change {', '.join(go)}, so that each is a training sample of its own"
            )
            parts.append(f"chat_template sets one that only appends: {self.appending}")
        if self.keeps_text_with_calls is False:
            parts.append(
                "later turns leave out the text beside a call, so that such a turn is a training "
                "sample of its own"
            )
        if self.refused:
            implied = {use for of, uses in _IMPLIED.items() if of in self.refused for use in uses}
            uses = ", ".join(use for use in self.refused if use not in implied)
            parts.append(f"refused where a run needs it: {uses} (run.json says why)")
        if self.no_end is not None:
            parts.append(self.no_end)
        return "chat template: " + "; ".join(parts)

    def row(self) -> dict[str, JsonValue]:
        """Return the fields as JSON, for `run.json`."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {**found, "refused": dict(self.refused)}


def probe_template(renderer: Renderer) -> TemplateReport:
    """Try conversations that break templates: thinking, a call, its result, another turn."""
    form = renderer.format
    refused = {use.value: reason for use in Use if (reason := renderer.refusal(use)) is not None}
    # Some templates are for conversations with tools alone.
    bare: Tools = () if _is_taken(renderer, [_USER]) else PROBE_TOOLS
    takes_system = Use.SYSTEM not in refused
    start = [_SYSTEM, _USER] if takes_system else [_USER]
    with_tools = [_USER] if Use.SYSTEM_WITH_TOOLS in refused else start
    opening = renderer.text(start, tools=bare, add_generation_prompt=True)
    thinks = form.reasoning.name != "none" and not form.forbids_thinking(opening)
    thought = _THOUGHT if thinks else ""
    has_tools = Use.TOOLS not in refused
    answer = Message(role="assistant", content="It is dry.")
    thinking = Message(role="assistant", content="It is dry.", reasoning=_THOUGHT)
    call = Message(role="assistant", content="", reasoning=thought, tool_calls=(_CALL,))
    return TemplateReport(
        tool_call_parser=form.tool_calls.name,
        reasoning_parser=form.reasoning.name,
        takes_system=takes_system,
        no_end=renderer.no_end(tools=bare),
        appending=appending_templates(renderer.rendering.tokenizer),
        refused=refused,
        keeps_answers=_keeps(renderer, start, answer, _AGAIN, tools=bare),
        keeps_thinking=_keeps(renderer, start, thinking, _AGAIN, tools=bare) if thinks else None,
        keeps_calls=_keeps(renderer, with_tools, call, _RESULT, tools=PROBE_TOOLS)
        if has_tools
        else None,
        keeps_text_with_calls=keeps_text_with_calls(renderer.rendering) if has_tools else None,
    )


def _is_taken(renderer: Renderer, messages: Sequence[Message]) -> bool:
    try:
        renderer.text(messages, add_generation_prompt=True)
    except ConfigError:
        return False
    return True


def _keeps(
    renderer: Renderer, start: Sequence[Message], said: Message, then: Message, *, tools: Tools = ()
) -> bool | None:
    """Return whether the template still shows `said`, an answer to `start`, before `then`."""
    try:
        prompt = renderer.prompt(start, tools=tools)
        after = renderer.text([*start, said, then], tools=tools, add_generation_prompt=True)
    except ConfigError:
        return None
    shown = renderer.shown_turn(prompt, after, tools=tools)
    return shown is not None and same_words(said, shown)


def declared_uses(
    config: TrainConfig, described: Iterable[EnvironmentDescription] = ()
) -> list[Use]:
    """Return the uses of the template that settings or environments declare."""
    entries = (*config.environments, *config.evals.evals)
    is_native = any(entry.env.get("tool_call_format") == "native" for entry in entries)
    declared = uses_declared(offers_tools=True) if is_native else []
    for one in described:
        has_prompt = bool(one.system_prompt)
        declared += uses_declared(
            sends_system=has_prompt if one.sends_system is None else one.sends_system,
            offers_tools=one.offers_tools,
            goes_on=one.goes_on is True,
        )
    return [use for use in Use if use in declared]
