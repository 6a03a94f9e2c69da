"""Token-in token-out requests to one vLLM server, and the control calls of a weight update."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from telescope_core.errors import EndpointError
from telescope_core.types import Sampling, WeightVersion

CONTROL_DEADLINE_S = 120.0
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the server sampled, and under which weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token, nats, of the distribution sampled from."""
    finish_reason: Literal["stop", "length"]
    oldest_version: WeightVersion
    newest_version: WeightVersion


class TokenClient:
    """One server's HTTP connection pool. Cancelling a call aborts the request on the server."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.num_in_flight = 0
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        cache_salt: str,
    ) -> Generation:
        """Sample one continuation of `prompt_ids`."""
        request = {
            "token_ids": prompt_ids,
            "sampling_params": sampling_params(sampling, stop_token_ids),
            "cache_salt": cache_salt,
        }
        self.num_in_flight += 1
        try:
            reply = await self._post("/inference/v1/generate", request)
        finally:
            self.num_in_flight -= 1
        return parse_generation(reply, self.base_url)

    async def control(
        self, path: str, body: dict[str, Any] | None = None, *, query: str = ""
    ) -> None:
        """Call an administrative route; raises EndpointError when it does not succeed in time."""
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                await self._post(f"{path}{query}", body or {})
        except TimeoutError:
            raise EndpointError(
                f"{self.base_url}{path} did not answer within {CONTROL_DEADLINE_S:g} s"
            ) from None

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.base_url}{path}"
        try:
            async with self._session.post(url, data=orjson.dumps(body), headers=_JSON) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise EndpointError(
                f"no answer from the inference server at {url}: {type(error).__name__}: {error}"
            ) from error
        if response.status != 200:
            text = content.decode(errors="replace")[:500]
            raise EndpointError(f"{url} answered HTTP {response.status}: {text}")
        return orjson.loads(content)


def sampling_params(sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return `sampling` in vLLM's terms, asking for the log-prob of each sampled token."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "stop_token_ids": list(stop_token_ids),
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
    }


def parse_generation(reply: dict[str, Any], base_url: str) -> Generation:
    """Read one reply; raises EndpointError when tokens and log-probs do not match."""
    choice = reply["choices"][0]
    token_ids = tuple(choice["token_ids"] or ())
    entries = (choice.get("logprobs") or {}).get("content") or []
    if len(entries) != len(token_ids) or not token_ids:
        raise EndpointError(
            f"{base_url} returned {len(token_ids)} tokens with {len(entries)} log-probs; "
            "one log-prob per token was expected"
        )
    if choice["finish_reason"] not in ("stop", "length"):
        raise EndpointError(
            f"{base_url} ended a request with finish_reason {choice['finish_reason']!r}; "
            "expected 'stop' or 'length'"
        )
    versions = [parse_version(span["version"]) for span in choice.get("weight_versions") or []]
    return Generation(
        token_ids=token_ids,
        logprobs=tuple(entry["logprob"] for entry in entries),
        finish_reason=choice["finish_reason"],
        oldest_version=min(versions, default=0),
        newest_version=max(versions, default=0),
    )


def parse_version(text: str) -> WeightVersion:
    """Return the version a server reports; before the first update it says `default`."""
    return 0 if text == "default" else int(text)
