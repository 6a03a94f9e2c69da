"""The token-exact policy: text is never turned back into tokens once it was sampled.

Which sampled ids a request may reuse is decided in `chains`.
"""

from collections.abc import Sequence

from telescope_core.errors import ConfigError
from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, JsonValue, Message, Sampling
from telescope_train.inference.chains import Chain, prompt_for
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.renderer import Renderer


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
        prompt = prompt_for(self._renderer, self._chains, messages, tools=tools)
        self._require_room(len(prompt.token_ids), sampling.max_tokens)
        generation = await self._pool.generate(
            prompt.token_ids,
            sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            group_id=self._group_id,
        )
        said = self._renderer.parse(generation.token_ids, tools=tools, prompt=prompt)
        self._chains.append(
            Chain(prompt=prompt, completion_ids=tuple(generation.token_ids), said=said)
        )
        is_call = bool(said.tool_calls) and generation.finish_reason == "stop"
        return Completion(
            message=said,
            finish_reason="tool_calls" if is_call else generation.finish_reason,
            prompt_ids=prompt.token_ids,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            oldest_version=generation.oldest_version,
            newest_version=generation.newest_version,
            num_prompt_tokens=len(prompt.token_ids),
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
