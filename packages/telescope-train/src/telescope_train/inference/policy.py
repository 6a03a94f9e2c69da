"""The token-exact policy: text is never turned back into tokens once it was sampled.

A rollout's conversation is kept as chains of (messages, token ids). A request that continues a
chain reuses its ids and adds only what the template writes between the turns; a request that
does not starts a new chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telescope_core.errors import ConfigError
from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, JsonValue, Message, Sampling
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A conversation up to and including a sampled assistant message, and its tokens."""

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    ends_turn: bool
    """Whether the last sampled token is an end-of-turn token."""


class TokenPolicySource:
    """Gives each rollout a token-exact policy over the server pool."""

    def __init__(self, pool: ServerPool, renderer: Renderer, *, max_model_len: int | None) -> None:
        self._pool = pool
        self._renderer = renderer
        self._max_model_len = max_model_len

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of one rollout."""
        group_id = rollout_id.rpartition("/")[0]
        return TokenPolicy(self._pool, self._renderer, group_id, self._max_model_len)

    async def close(self) -> None:
        """The pool belongs to whoever made it."""


class TokenPolicy:
    """One rollout's policy."""

    def __init__(
        self, pool: ServerPool, renderer: Renderer, group_id: str, max_model_len: int | None
    ) -> None:
        self._pool = pool
        self._renderer = renderer
        self._group_id = group_id
        self._max_model_len = max_model_len
        self._chains: list[Chain] = []

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """None until a gateway serves it."""
        return None

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Answer `messages`, token-exactly."""
        prompt_ids = prompt_tokens(self._renderer, self._chains, messages, tools=tools)
        self._require_room(len(prompt_ids), sampling.max_tokens)
        generation = await self._pool.generate(
            prompt_ids,
            sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            group_id=self._group_id,
        )
        reply = Message(role="assistant", content=self._renderer.decode(generation.token_ids))
        self._chains.append(
            Chain(
                messages=(*messages, reply),
                token_ids=(*prompt_ids, *generation.token_ids),
                ends_turn=generation.token_ids[-1] in self._renderer.stop_token_ids,
            )
        )
        return Completion(
            message=reply,
            finish_reason=generation.finish_reason,
            prompt_ids=tuple(prompt_ids),
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            oldest_version=generation.oldest_version,
            newest_version=generation.newest_version,
            num_prompt_tokens=len(prompt_ids),
            num_completion_tokens=len(generation.token_ids),
        )

    def _require_room(self, num_prompt_tokens: int, max_tokens: int) -> None:
        limit = self._max_model_len
        if limit is not None and num_prompt_tokens + max_tokens > limit:
            raise ConfigError(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens = {max_tokens} need "
                f"{num_prompt_tokens + max_tokens} tokens, but max_model_len is {limit}; "
                "lower max_tokens or raise max_model_len"
            )


def prompt_tokens(
    renderer: Renderer,
    chains: Sequence[Chain],
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, JsonValue]] = (),
) -> list[int]:
    """Return the ids that stand for `messages`, reusing the longest chain that they continue."""
    wanted = tuple(messages)
    covering = [chain for chain in chains if wanted[: len(chain.messages)] == chain.messages]
    chain = max(covering, key=lambda candidate: len(candidate.messages), default=None)
    if chain is not None:
        bridge = renderer.bridge(messages, len(chain.messages), tools=tools)
        if bridge is not None:
            # A turn cut by max_tokens has no end; the template's own stands in, untrained.
            end = [] if chain.ends_turn else [renderer.stop_token_ids[0]]
            return [*chain.token_ids, *end, *renderer.encode(bridge)]
    return renderer.encode(renderer.text(messages, tools=tools, add_generation_prompt=True))
