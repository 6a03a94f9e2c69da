"""`ChatClient`: a policy behind any OpenAI-compatible chat endpoint.

One client keeps its connections open for a whole run. Busy or broken answers (429, 5xx, a refused
or dropped connection) are tried again with growing pauses until a bounded budget is spent; every
other refusal is an EndpointError at once, naming the address, the status and what to do.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Literal

import httpx

from telescope_core.chat_messages import completion_from_json, message_to_json
from telescope_core.errors import ConfigError, EndpointError, unknown_name
from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, JsonValue, Message, Sampling

# httpx walks all connections of a pool, twice nested, for each request: with one pool of 64 that
# costs more than the request. Several pools of few connections each keep it small.
_NUM_POOLS = 32
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_QUOTED_CHARACTERS = 300


class ChatClient:
    """Gives each rollout a policy at `base_url` (such as `http://127.0.0.1:8000/v1`).

    Without `model` the only model the endpoint serves is used. `retry_budget_s` bounds the time
    one request may spend failing before it is given up.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        retry_budget_s: float = 60.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base URL {base_url!r} must begin with http:// or https://, "
                "such as http://127.0.0.1:8000/v1"
            )
        self.base_url = base_url.rstrip("/")
        self._model = model
        self._api_key = api_key
        self._model_lock = asyncio.Lock()
        self._retry_budget_s = retry_budget_s
        self._request_timeout_s = request_timeout_s
        tls = httpx.create_ssl_context() if self.base_url.startswith("https://") else False
        # A proxy of the environment cannot reach a server that listens on this machine alone.
        is_local = httpx.URL(self.base_url).host in ("localhost", "127.0.0.1", "::1")
        self._pools = [
            httpx.AsyncClient(
                verify=tls,
                trust_env=not is_local,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(request_timeout_s, connect=10.0, pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
            for _ in range(_NUM_POOLS)
        ]
        self._next_pool = cycle(self._pools)

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of one rollout; an endpoint keeps no history: neither is used."""
        return _ChatPolicy(self)

    @property
    def endpoint(self) -> ChatEndpoint:
        """The endpoint itself; raises ConfigError while the model is neither named nor asked."""
        if self._model is None:
            raise ConfigError(f"name the model at {self.base_url}, or await `check` first")
        return ChatEndpoint(
            base_url=self.base_url, api_key=self._api_key or "none", model=self._model
        )

    async def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            await pool.aclose()

    async def list_models(self) -> list[str]:
        """Return the ids of the models served there."""
        reply = await self._request("GET", "/models")
        entries = reply.get("data")
        if not isinstance(entries, list):
            raise EndpointError(
                f"{self.base_url}/models did not answer with a list of models; "
                "is this the address of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            )
        return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    async def model(self) -> str:
        """Return the model in use, asking the endpoint when none was named."""
        async with self._model_lock:
            if self._model is None:
                self._model = _only_one(await self.list_models(), self.base_url)
            return self._model

    async def check(self) -> None:
        """Raise unless the endpoint answers and serves the model."""
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
        """Answer `messages`; cancelling the caller cancels the request."""
        body: dict[str, Any] = {
            "model": await self.model(),
            "messages": [message_to_json(message) for message in messages],
            **_sampling_fields(sampling),
        }
        if tools:
            body["tools"] = list(tools)
        reply = await self._request("POST", "/chat/completions", body)
        return completion_from_json(reply, where=f"{self.base_url}/chat/completions")

    async def _request(
        self, method: Literal["GET", "POST"], path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        give_up_s = time.monotonic() + self._retry_budget_s
        pause_s = _FIRST_PAUSE_S
        while True:
            outcome = await self._attempt(method, self.base_url + path, body)
            if isinstance(outcome, dict):
                return outcome
            error, wait_s = outcome
            wait_s = max(wait_s, pause_s * random.uniform(0.5, 1.0))
            if time.monotonic() + wait_s > give_up_s:
                raise error
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attempt(
        self, method: str, url: str, body: dict[str, Any] | None
    ) -> dict[str, Any] | tuple[EndpointError, float]:
        """Return the reply, or what went wrong with the seconds to wait before the next try."""
        try:
            reply = await next(self._next_pool).request(method, url, json=body)
        except (httpx.ConnectTimeout, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return _unreachable(url, error), 0.0
        except httpx.TimeoutException as error:
            raise EndpointError(
                f"{url} did not answer in {self._request_timeout_s:g} s ({type(error).__name__}); "
                "lower max_tokens or the concurrency, or allow more time"
            ) from None
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from None
        if reply.is_success:
            return _json_object(reply, url)
        refusal = _refusal(reply, url)
        if reply.status_code == 429 or reply.status_code >= 500:
            return refusal, _retry_after_s(reply)
        raise refusal


class _ChatPolicy:
    def __init__(self, client: ChatClient) -> None:
        self._client = client

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
        return await self._client.complete(messages, sampling, tools=tools)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the request fields; those outside the OpenAI API only where they are not neutral."""
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


def _json_object(reply: httpx.Response, url: str) -> dict[str, Any]:
    try:
        content: object = reply.json()
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content  # pyright: ignore[reportUnknownVariableType]
    raise EndpointError(
        f"{url} answered {reply.status_code} without a JSON object: {_quote(reply)!r}; "
        "is this the address of an OpenAI-compatible endpoint (it usually ends in /v1)?"
    )


_ADVICE = {
    400: "the request does not fit this model (prompt too long, or an unsupported setting)",
    401: "set the API key",
    403: "this API key may not use the model",
    404: "check the base URL (it usually ends in /v1) and the model name",
    422: "the endpoint does not accept one of the settings",
    429: "too many requests: lower the concurrency",
}


def _refusal(reply: httpx.Response, url: str) -> EndpointError:
    advice = _ADVICE.get(reply.status_code, "look at the log of the server")
    return EndpointError(f"{url} answered {reply.status_code}: {_quote(reply)}; {advice}")


def _unreachable(url: str, error: Exception) -> EndpointError:
    reason = str(error) or type(error).__name__
    return EndpointError(
        f"{url} cannot be reached ({reason}); check the address and that the server is running"
    )


def _quote(reply: httpx.Response) -> str:
    text = " ".join(reply.text.split())
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."


def _retry_after_s(reply: httpx.Response) -> float:
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
