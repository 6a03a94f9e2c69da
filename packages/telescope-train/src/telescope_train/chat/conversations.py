"""Conversations: the sampled tokens of a rollout, and prompts that continue them.

A request reuses the ids of an answer if its messages and its text both begin with the conversation
up to and including that answer. Any other request is rendered anew, and answers that are still in
it keep their ids. An answer needs little memory: its tokens are a place in a chain, and consecutive
answers share one list of messages.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telescope_core.base.chains import SampledTokens
from telescope_core.base.types import Message, Tools
from telescope_train.chat.formats import same_message
from telescope_train.chat.renderer import Prompt, Renderer


@dataclass(slots=True, kw_only=True)
class _Answer:
    """A prompt and the completion that was sampled for it."""

    line: list[Message]
    """The conversation, and later additions to it in the same line of answers."""
    num_messages: int
    """Number of messages of `line` in the conversation, including the sampled one."""
    tokens: SampledTokens
    tools: Tools
    num_ends_added: int
    text: str | None
    """Text of the prompt; None once a later answer continues this one, to save memory."""

    @property
    def said(self) -> Message:
        """The message that was sampled."""
        return self.line[self.num_messages - 1]


class Conversations:
    """The answers of one rollout; any of them can be continued."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._answers: list[_Answer] = []

    def prompt_for(self, messages: Sequence[Message], *, tools: Tools = ()) -> Prompt:
        """Return the prompt for `messages`: it continues the longest answer that fits, or is new.

        A caller may have left out or changed something before later answers. Those answers keep
        their ids as well, unless the template shows them differently. Callers may strip or reformat
        the messages that they send back. The prompt has the messages as they were sampled, because
        only these match the ids.
        """
        own, answer = list(messages), self._longest(messages)
        start = 0 if answer is None else answer.num_messages
        if answer is not None:
            own[:start] = answer.line[:start]
        later = self._answers_in(own, start)
        own = [later[at].said if at in later else message for at, message in enumerate(own)]
        prompt = self._joined(own, answer, {}, tools)
        # Rendering once for each answer takes time, and most are spelled as they were sampled.
        others = _not_in(prompt.ids, later)
        return self._joined(own, answer, others, tools) if others else prompt

    def _joined(
        self,
        messages: Sequence[Message],
        first: _Answer | None,
        later: Mapping[int, _Answer],
        tools: Tools,
    ) -> Prompt:
        """Return the prompt for `messages`, with the ids of earlier answers where they can be kept.

        `messages` begin with the conversation of `first`; `later` are answers by their places.
        """
        answer = first
        prompt = None if first is None else self._prompt_of(first)
        for end in (*later, len(messages)):
            if prompt is not None and answer is not None:
                ids = answer.tokens.completion_ids
                prompt = self._renderer.extended(prompt, ids, messages[:end], tools=tools)
            if prompt is None:
                prompt = self._renderer.prompt(messages[:end], tools=tools)
            answer = later.get(end)
        assert prompt is not None, "the loop ends with all messages"
        return prompt

    def add(
        self, prompt: Prompt, said: Message, tokens: SampledTokens, *, tools: Tools = ()
    ) -> None:
        """Record that `said` was the answer to `prompt`."""
        line, num_messages = [*prompt.messages], len(prompt.messages)
        before = self._longest(prompt.messages)
        if before is not None:
            before.text = None
            # A program sends its tools with every request; equal ones are held once.
            tools = before.tools if before.tools == tools else tools
            # Only the newest answer of a line can be gone on from in it, and only in its own words:
            # a request that did not know of that answer yet has them as its caller wrote them.
            if before.line == line[: before.num_messages]:
                before.line.extend(line[before.num_messages :])
                line = before.line
        line.append(said)
        self._answers.append(
            _Answer(
                line=line,
                num_messages=num_messages + 1,
                tokens=tokens,
                tools=tools,
                num_ends_added=prompt.num_ends_added,
                text=prompt.text,
            )
        )

    def _longest(self, messages: Sequence[Message]) -> _Answer | None:
        """Return the answer with the longest conversation that begins `messages`."""
        # The longest comes first, so that a conversation that only grows is compared with one
        # answer. Of two answers with the same messages the later one is taken, because a caller
        # that asked the same thing twice goes on from the latest answer.
        newest_first = self._answers[::-1]
        by_length = sorted(newest_first, key=lambda answer: answer.num_messages, reverse=True)
        return next((answer for answer in by_length if _covers(answer, messages)), None)

    def _answers_in(self, messages: Sequence[Message], start: int) -> dict[int, _Answer]:
        """Return this rollout's answers among `messages` from `start` on, by position."""
        found: dict[int, _Answer] = {}
        # Something has to come before an answer.
        for place in range(max(start, 1), len(messages)):
            if messages[place].role == "assistant":
                answers = (
                    one for one in self._answers[::-1] if same_message(one.said, messages[place])
                )
                if (answer := next(answers, None)) is not None:
                    found[place] = answer
        return found

    def _prompt_of(self, answer: _Answer) -> Prompt:
        messages = tuple(answer.line[: answer.num_messages - 1])
        text = answer.text
        if text is None:
            text = self._renderer.text(messages, tools=answer.tools, add_generation_prompt=True)
        return Prompt(
            messages=messages,
            text=text,
            ids=answer.tokens.prompt_ids,
            num_ends_added=answer.num_ends_added,
        )


def _not_in(ids: "array[int]", answers: Mapping[int, _Answer]) -> dict[int, _Answer]:
    """Return those of `answers` whose ids do not occur in `ids` one after the other."""
    content, at = ids.tobytes(), 0
    missing: dict[int, _Answer] = {}
    for place, answer in answers.items():
        wanted = answer.tokens.completion_ids.tobytes()
        found = content.find(wanted, at)
        if found < 0 or found % ids.itemsize:
            missing[place] = answer
        else:
            at = found + len(wanted)
    return missing


def _covers(answer: _Answer, messages: Sequence[Message]) -> bool:
    size = answer.num_messages
    # The answer itself first: that is what a caller who rewrites history has changed.
    return (
        size <= len(messages)
        and same_message(answer.line[size - 1], messages[size - 1])
        and all(map(same_message, answer.line[: size - 1], messages))
    )
