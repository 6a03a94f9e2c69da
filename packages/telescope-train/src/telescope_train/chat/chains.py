"""Chains: the tokens a rollout has behind it, and the prompt that continues one of them. Pure.

A chain is a conversation up to and including a sampled assistant message. A request whose messages
begin with a chain's, and whose text begins with the chain's, reuses its ids; any other request is
rendered anew, and becomes a training sample of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telescope_core.types import Message
from telescope_train.chat.formats import same_message
from telescope_train.chat.renderer import Prompt, Renderer, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A prompt and what was sampled for it."""

    prompt: Prompt
    completion_ids: tuple[int, ...]
    said: Message
    """What was sampled, as the caller got it."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, the sampled message included."""
        return (*self.prompt.messages, self.said)


def prompt_for(
    renderer: Renderer,
    chains: Sequence[Chain],
    messages: Sequence[Message],
    *,
    tools: Tools = (),
) -> Prompt:
    """Return the prompt for `messages`: the longest chain's continued, or else a new one."""
    # Longest first, so that a conversation that only grows is compared with one chain. Of two that
    # say the same, the later one is what the caller goes on from.
    newest_first = chains[::-1]
    by_length = sorted(newest_first, key=lambda chain: len(chain.prompt.messages), reverse=True)
    chain = next((chain for chain in by_length if _covers(chain, messages)), None)
    if chain is None:
        return renderer.prompt(messages, tools=tools)
    # The chain's own messages, not what the caller made of them: they give the chain's text.
    own = (*chain.messages, *messages[len(chain.messages) :])
    continued = renderer.extended(chain.prompt, chain.completion_ids, own, tools=tools)
    return continued or renderer.prompt(own, tools=tools)


def _covers(chain: Chain, messages: Sequence[Message]) -> bool:
    own = chain.messages
    return len(own) <= len(messages) and all(
        same_message(given, sent) for given, sent in zip(own, messages, strict=False)
    )
