"""`ChatClient`: a policy source for any OpenAI-compatible chat endpoint.

It writes requests and reads replies. The module `http` handles connections, deadlines and retries.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from telescope_core.chains import ChainRecorder
from telescope_core.chat.http import HttpPool, RequestLimits
from telescope_core.chat.messages import message_to_json
from telescope_core.chat.replies import read_completion, read_models, read_token_completion
from telescope_core.errors import ConfigError, unknown_name
from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, JsonValue, Message, Sampling


class ChatClient:
    """Creates policies that use the endpoint at `base_url`, such as `http://127.0.0.1:8000/v1`.

    Without `model`, the endpoint must serve exactly one model, which is used. `with_tokens` asks
    for token ids and log-probs, which vLLM supports but the OpenAI API does not. Clients of
    several endpoints may share a `pool`, which its creator must close.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        limits: RequestLimits | None = None,
        with_tokens: bool = False,
        pool: HttpPool | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base URL {base_url!r} must begin with http:// or https://, "
                "such as http://127.0.0.1:8000/v1"
            )
        self.base_url = base_url.rstrip("/")
        self._chat_url = f"{self.base_url}/chat/completions"
        self._model = model
        self._model_lock = asyncio.Lock()
        self._api_key = api_key
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._limits = limits or RequestLimits()
        self._pool = pool or HttpPool()
        self._owns_pool = pool is None
        self._read = read_token_completion if with_tokens else read_completion
        self._extra = {"logprobs": True, "return_token_ids": True} if with_tokens else {}

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of one rollout, which records its tokens if they are asked for.

        The arguments are not used, because the endpoint keeps no state per rollout.
        """
        return _ChatPolicy(self)

    @property
    def endpoint(self) -> ChatEndpoint:
        """The endpoint itself; raises ConfigError while the name of its model is not known."""
        if self._model is None:
            raise ConfigError(
                f"the model at {self.base_url} is not known yet; name it, or await `check` first"
            )
        return ChatEndpoint(
            base_url=self.base_url, api_key=self._api_key or "none", model=self._model
        )

    async def close(self) -> None:
        """Close the connections, unless they belong to a shared pool."""
        if self._owns_pool:
            await self._pool.close()

    async def list_models(self) -> list[str]:
        """Return the ids of the models served there."""
        url = f"{self.base_url}/models"
        reply = await self._pool.request("GET", url, headers=self._headers, limits=self._limits)
        return read_models(reply, where=url)

    async def model(self) -> str:
        """Return the name of the model in use; asks the endpoint when none was given."""
        if self._model is None:
            async with self._model_lock:
                if self._model is None:
                    self._model = _only_one(await self.list_models(), self.base_url)
        return self._model

    async def check(self) -> None:
        """Raise a TelescopeError unless the endpoint answers and serves the model."""
        served = await self.list_models()
        if self._model is not None and self._model not in served:
            raise unknown_name("model", self._model, served, f"(served by {self.base_url})")
        await self.model()

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Return the model's answer to `messages`; cancelling the caller cancels the request."""
        body: dict[str, Any] = {
            "model": await self.model(),
            "messages": [message_to_json(message) for message in messages],
            **_sampling_fields(sampling),
            **self._extra,
        }
        if tools:
            body["tools"] = list(tools)
        reply = await self._pool.request(
            "POST",
            self._chat_url,
            msgspec.json.encode(body),
            headers=self._headers,
            limits=self._limits,
        )
        return self._read(reply, where=self._chat_url)


class _ChatPolicy:
    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._recorder = ChainRecorder()

    @property
    def endpoint(self) -> ChatEndpoint:
        return self._client.endpoint

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        completion = await self._client.complete(messages, sampling, tools=tools)
        alone = completion.tokens
        if alone is None:
            return completion
        tokens = self._recorder.record(
            alone.prompt_ids, alone.completion_ids, alone.logprobs, temperature=sampling.temperature
        )
        return replace(completion, tokens=tokens)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the request fields; those outside the OpenAI API only when they are not neutral."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.top_k > 0:
        fields["top_k"] = sampling.top_k
    if sampling.min_p > 0.0:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        fields["repetition_penalty"] = sampling.repetition_penalty
    return fields


def _only_one(served: list[str], base_url: str) -> str:
    if len(served) == 1:
        return served[0]
    listed = ", ".join(served) or "none"
    raise ConfigError(
        f"{base_url} serves {len(served)} models ({listed}); name the one you mean with --model"
    )
