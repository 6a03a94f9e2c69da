"""Conversations: what a rollout has sampled so far, and prompts that continue it.

A request reuses the ids of an answer if its messages and its text both begin with those up to and
including that answer. Any other request is rendered anew. An answer holds little of its own: its
tokens are a place in a chain, and answers that follow each other share one list of messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telescope_core.base.chains import SampledTokens
from telescope_core.base.types import Message
from telescope_train.chat.formats import same_message
from telescope_train.chat.renderer import Prompt, Renderer
from telescope_train.chat.rendering import Tools


@dataclass(slots=True, kw_only=True)
class _Answer:
    """A prompt and the completion that was sampled for it."""

    line: list[Message]
    """The conversation, and what later answers of the same line added to it."""
    num_messages: int
    """How many messages of `line` the conversation has, the sampled one included."""
    tokens: SampledTokens
    tools: Tools
    num_ends_added: int
    text: str | None
    """Text of the prompt; None once an answer goes on from this one, because it is long."""


class Conversations:
    """The answers of one rollout. A conversation may be continued from any of them."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._answers: list[_Answer] = []

    def prompt_for(self, messages: Sequence[Message], *, tools: Tools = ()) -> Prompt:
        """Return the prompt for `messages`: it continues the longest answer that fits, or is new.

        Callers may strip or reformat what they send back. The prompt has the messages as they
        were sampled, because only they give the text that the ids stand for.
        """
        answer = self._longest(messages)
        if answer is None:
            return self._renderer.prompt(messages, tools=tools)
        said = answer.line[: answer.num_messages]
        own = (*said, *messages[len(said) :])
        before = self._prompt_of(answer)
        completion_ids = answer.tokens.completion_ids
        continued = self._renderer.extended(before, completion_ids, own, tools=tools)
        return continued or self._renderer.prompt(own, tools=tools)

    def add(
        self, prompt: Prompt, said: Message, tokens: SampledTokens, *, tools: Tools = ()
    ) -> None:
        """Remember that `prompt` was answered with `said`."""
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
        """Return the answer with the longest conversation that `messages` begin with."""
        # The longest comes first, so that a conversation that only grows is compared with one
        # answer. Of two answers with the same messages the later one is taken, because a caller
        # that asked the same thing twice goes on from the latest answer.
        newest_first = self._answers[::-1]
        by_length = sorted(newest_first, key=lambda answer: answer.num_messages, reverse=True)
        return next((answer for answer in by_length if _covers(answer, messages)), None)

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


def _covers(answer: _Answer, messages: Sequence[Message]) -> bool:
    size = answer.num_messages
    # The answer itself first: that is what a caller who rewrites history has changed.
    return (
        size <= len(messages)
        and same_message(answer.line[size - 1], messages[size - 1])
        and all(map(same_message, answer.line[: size - 1], messages))
    )
