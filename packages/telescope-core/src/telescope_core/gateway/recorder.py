"""`Recorder`: the requests and answers of one rollout's policy, whichever way they came.

An environment asks with `episode.generate`; a program that it runs asks at the rollout's endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from telescope_core.base.agents import agent_of
from telescope_core.base.attempts import is_too_long
from telescope_core.base.errors import TelescopeError
from telescope_core.base.types import Completion, Message, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageKey:
    """Identifies a message in a history that a program sends back."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...]
    tool_call_id: str | None


class Recorder:
    """The turns of one rollout, and the conversations that a program had at its endpoint."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        """Every answer so far, in the order in which the answers ended."""
        self.leaves_out_thinking = False
        """Whether a program sent back a turn without the thinking that it had received with it."""
        self.was_asked = False
        """Whether there was any request."""
        self.is_out_of_context = False
        """Whether the latest request did not fit the model's context, though earlier ones did."""
        self._unanswered: dict[tuple[Message, ...], TelescopeError] = {}
        self._conversations: list[list[Message]] = []

    @property
    def failure(self) -> TelescopeError | None:
        """The error of a request that failed and did not succeed later; None = there is none."""
        return next(iter(self._unanswered.values()), None)

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """Each conversation of the program that does not continue an earlier one."""
        return tuple(tuple(one) for one in self._conversations)

    def failed(self, asked: tuple[Message, ...], error: TelescopeError) -> None:
        """Record `error` until the same messages are answered.

        A program may ignore the error and continue, and its reward must then not count for the
        policy. A later turn that does not fit the context is no such error: it is a limit of the
        policy.
        """
        if self.turns and is_too_long(error):
            self.is_out_of_context = True
            return
        self._unanswered[asked] = error

    def answered(self, asked: tuple[Message, ...], turn: Turn) -> None:
        """Record the answer to `asked`."""
        self._unanswered.pop(asked, None)
        self.is_out_of_context = False
        self.turns.append(replace(turn, agent=agent_of(asked)))

    def heard(self, asked: Sequence[Message], completion: Completion) -> None:
        """Record a program's request at the endpoint, and its answer."""
        for said in self._conversations:
            if len(said) <= len(asked) and all(map(_is_same, said, asked)):
                self.leaves_out_thinking |= any(map(_lost_thinking, said, asked))
                said += (*asked[len(said) :], completion.message)
                return
        self._conversations.append([*asked, completion.message])


def _is_same(known: Message, sent: Message) -> bool:
    """Return whether a program sends back a message that it received, perhaps reformatted."""
    return known == sent or _key(known) == _key(sent)


def _key(message: Message) -> _MessageKey:
    return _MessageKey(
        role=message.role,
        content=message.content.strip(),
        calls=tuple((call.id, call.name) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _lost_thinking(known: Message, sent: Message) -> bool:
    return bool(known.reasoning) and not sent.reasoning
