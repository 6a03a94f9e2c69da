"""`UserSimulator`: a model that plays the user of a conversation with the policy."""

from collections.abc import Sequence

from telescope_core.base.images import with_marks
from telescope_core.base.types import Message
from telescope_core.models.helper_models import HelperModel, HelperModelConfig, Owner

_INSTRUCTIONS = """You play a person who talks to an assistant. Stay in this role, write only what
that person would say, and never help the assistant with its work.

Who you are and what you want:
{instructions}

When you have what you want, or see that you will not get it, answer with {done} alone."""
_BEGIN = Message(role="user", content="(The assistant is listening. Begin.)")


class UserSimulatorConfig(HelperModelConfig):
    """Settings of the user model; the field `user` of a Config gets `--env.user.x` flags."""

    temperature: float = 0.7
    done_text: str = "[DONE]"
    """Text with which the simulated user ends the conversation."""


class UserSimulator:
    """A simulated user of the assistant.

    Create one in the environment's `__init__`, with the environment as `owner`, and use it for
    every rollout: it keeps no state of a conversation. `role` names it in metrics and errors.
    """

    def __init__(self, config: UserSimulatorConfig, owner: Owner, *, role: str = "user") -> None:
        self._done_text = config.done_text
        self._model = HelperModel(config, owner, role=role)

    async def reply(self, messages: Sequence[Message], *, instructions: str) -> str | None:
        """Return the user's next message; None when the user ends the conversation.

        `messages` is the conversation as the policy sees it. The user sees only the user and
        assistant messages, not system prompts or tool results. `instructions` says who the user
        is and what they want. Raises JudgeError when the model gives no usable answer.
        """
        system = _INSTRUCTIONS.format(instructions=instructions.strip(), done=self._done_text)
        asked = [Message(role="system", content=system), _BEGIN, *_as_seen_by_user(messages)]
        return await self._model.ask(asked, self._read, wanted="what the person says next")

    def _read(self, text: str) -> str | None:
        if self._done_text in text:
            return None
        if not text:
            raise ValueError("the answer is empty")
        return text


def _as_seen_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with roles swapped: the user's words become the model's own."""
    return [
        Message(role="assistant" if message.role == "user" else "user", content=text)
        for message in messages
        if message.role in ("user", "assistant") and (text := with_marks(message))
    ]
