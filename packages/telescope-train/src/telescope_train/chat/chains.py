"""Chains: the tokens that a rollout has sampled so far, and prompts that continue them. Pure.

A chain is a conversation up to and including a sampled assistant message. A request reuses the ids
of a chain if its messages and its text both begin with those of the chain. Any other request is
rendered anew and becomes a training sample of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telescope_core.types import Message
from telescope_train.chat.formats import same_message
from telescope_train.chat.renderer import Prompt, Renderer, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A prompt and the completion that was sampled for it."""

    prompt: Prompt
    completion_ids: tuple[int, ...]
    """[T] token ids as sampled, the end-of-turn token included if there was one."""
    said: Message
    """The sampled message, as the caller received it."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, including the sampled message."""
        return (*self.prompt.messages, self.said)


def prompt_for(
    renderer: Renderer,
    chains: Sequence[Chain],
    messages: Sequence[Message],
    *,
    tools: Tools = (),
) -> Prompt:
    """Return the prompt for `messages`: it continues the longest chain that fits, or is new."""
    # The longest comes first, so that a conversation that only grows is compared with one chain.
    # Of two chains with the same messages the later one is taken, because a caller that asked the
    # same thing twice goes on from the latest answer.
    newest_first = chains[::-1]
    by_length = sorted(newest_first, key=lambda chain: len(chain.prompt.messages), reverse=True)
    chain = next((chain for chain in by_length if _covers(chain, messages)), None)
    if chain is None:
        return renderer.prompt(messages, tools=tools)
    # Callers may strip or reformat what they send back. The chain's own messages are rendered
    # instead, because only they give the text that the chain's ids stand for.
    own = (*chain.messages, *messages[len(chain.messages) :])
    continued = renderer.extended(chain.prompt, chain.completion_ids, own, tools=tools)
    return continued or renderer.prompt(own, tools=tools)


def _covers(chain: Chain, messages: Sequence[Message]) -> bool:
    own = chain.messages
    return len(own) <= len(messages) and all(
        same_message(given, sent) for given, sent in zip(own, messages, strict=False)
    )
