"""`UserSimulator`: a model that plays the user of a conversation with the policy."""

from collections.abc import Sequence

from telescope_core.helper_models import HelperModel, HelperModelConfig, Owner
from telescope_core.types import Message

_INSTRUCTIONS = """You play a person who talks to an assistant. Stay in this role, write only what
that person would say, and never help the assistant with its work.

Who you are and what you want:
{instructions}

When you have what you want, or see that you will not get it, answer with {done} alone."""
_BEGIN = Message(role="user", content="(The assistant is listening. Begin.)")


class UserSimulatorConfig(HelperModelConfig):
    """The model that plays the user; as the field `user` it has flags `--env.user.x`."""

    temperature: float = 0.7
    done_text: str = "[DONE]"
    """What the simulated user says to end the conversation."""


class UserSimulator:
    """A simulated user. Make one in the environment's `__init__`; it keeps no conversation."""

    def __init__(self, config: UserSimulatorConfig, owner: Owner, *, role: str = "user") -> None:
        self._done_text = config.done_text
        self._model = HelperModel(config, owner, role=role)

    async def reply(self, messages: Sequence[Message], *, instructions: str) -> str | None:
        """Return what the user says next; None when the conversation is over for them.

        `messages` is the conversation as the policy sees it; of it the user knows what was said,
        not system prompts and not what tools answered. `instructions` say who the user is and
        what they want. Raises JudgeError when the model gives nothing.
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
    """Return the conversation with roles exchanged: the user's words are the model's own."""
    return [
        Message(role="assistant" if message.role == "user" else "user", content=message.content)
        for message in messages
        if message.role in ("user", "assistant") and message.content
    ]
