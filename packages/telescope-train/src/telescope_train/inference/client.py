"""Token-in token-out requests to one vLLM server, and the control calls of a weight update."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, cast

import aiohttp
import msgspec
import orjson

from telescope_core.errors import EndpointError
from telescope_core.types import Sampling, WeightVersion
from telescope_train.inference.wire import (
    MAX_FRAME_BYTES,
    TOKEN_PLANE_PATH,
    CancelRequest,
    Outbox,
    ServerFrame,
    TokenReply,
    TokenRequest,
    column,
)

CONTROL_DEADLINE_S = 120.0
_PAUSES_S = (0.25, 0.5, 1.0)
"""Between two tries of a control call."""
_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_JSON = {"content-type": "application/json"}
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the server sampled, and under which weights."""

    token_ids: "array[int]"
    """int32."""
    logprobs: "array[float]"
    """float32, one per token, nats, of the distribution sampled from."""
    finish_reason: Literal["stop", "length"]
    oldest_version: WeightVersion
    newest_version: WeightVersion


class TokenClient:
    """One server's connections: the token plane, and HTTP for control.

    Cancelling a call aborts the request on the server.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.num_in_flight = 0
        # A control call each time on a connection of its own: between two steps a server may close
        # one that is idle (vLLM after 5 s) in the very moment in which the next call goes out.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        )
        self._plane: Plane | None = None
        self._opening = asyncio.Lock()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        cache_salt: str,
        priority: int = 0,
    ) -> Generation:
        """Sample one continuation of `prompt_ids`; a lower `priority` goes first."""
        self.num_in_flight += 1
        try:
            plane = await self._open_plane()
            reply = await plane.request(
                prompt_ids,
                sampling=encoded_params(sampling, stop_token_ids),
                cache_salt=cache_salt,
                priority=priority,
            )
        finally:
            self.num_in_flight -= 1
        return parse_reply(reply, self.base_url)

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
    ) -> None:
        """Call an administrative route; raises EndpointError when it does not succeed in time.

        What never reached the server is tried again, a few times; what may have reached it only
        when doing it twice is the same as doing it once (`is_repeatable`).
        """
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                await self._post_again(f"{path}{query}", body or {}, is_repeatable=is_repeatable)
        except TimeoutError:
            raise EndpointError(
                f"{self.base_url}{path} did not answer within {CONTROL_DEADLINE_S:g} s"
            ) from None

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._plane is not None:
            await self._plane.close()
        await self._session.close()

    async def _open_plane(self) -> "Plane":
        """Return the open token plane; a lost one is opened anew."""
        if self._plane is not None and self._plane.is_open:
            return self._plane
        async with self._opening:
            if self._plane is None or not self._plane.is_open:
                url = f"{self.base_url}{TOKEN_PLANE_PATH}"
                try:
                    # No compression: token ids do not shrink enough to pay for it on a fast link.
                    socket = await self._session.ws_connect(
                        url, max_msg_size=MAX_FRAME_BYTES, compress=0
                    )
                except aiohttp.ClientError as error:
                    raise _no_answer(url, error) from error
                self._plane = Plane(socket, url)
            return self._plane

    async def _post_again(self, path: str, body: dict[str, Any], *, is_repeatable: bool) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                return await self._post(path, body)
            except aiohttp.ClientError as error:
                if pause_s is None or not (is_repeatable or isinstance(error, _UNSENT)):
                    raise _no_answer(f"{self.base_url}{path}", error) from error
                await asyncio.sleep(pause_s)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        url = f"{self.base_url}{path}"
        async with self._session.post(url, data=orjson.dumps(body), headers=_JSON) as response:
            content = await response.read()
        if response.status != 200:
            text = content.decode(errors="replace")[:500]
            raise EndpointError(f"{url} answered HTTP {response.status}: {text}")


class Plane:
    """One open WebSocket: requests out, replies in, matched by number."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._url = url
        self._waiting: dict[int, asyncio.Future[TokenReply]] = {}
        self._numbers = count()
        self._outbox = Outbox[TokenRequest | CancelRequest](self._send)
        self._decoder = msgspec.msgpack.Decoder(ServerFrame)
        self._tasks = [
            asyncio.create_task(self._outbox.run()),
            asyncio.create_task(self._read()),
        ]

    @property
    def is_open(self) -> bool:
        """Whether requests can be made."""
        return not self._socket.closed and not any(task.done() for task in self._tasks)

    async def request(
        self, prompt_ids: Sequence[int], *, sampling: msgspec.Raw, cache_salt: str, priority: int
    ) -> TokenReply:
        """Send one request and wait for its reply; raises EndpointError when the plane is lost."""
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        ids = array("i", prompt_ids).tobytes()
        self._outbox.put(
            TokenRequest(number, ids, sampling, cache_salt=cache_salt, priority=priority)
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._outbox.put(CancelRequest(number))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Close the connection; what is still waited for fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()
        self._fail("it was closed")

    async def _send(self, items: list[TokenRequest | CancelRequest]) -> None:
        try:
            await self._socket.send_bytes(_ENCODER.encode(items))
        except (aiohttp.ClientError, ConnectionError) as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                for reply in self._decoder.decode(message.data):
                    future = self._waiting.get(reply.id)
                    if future is not None and not future.done():
                        future.set_result(reply)
        except msgspec.MsgspecError as error:
            self._fail(f"it sent a malformed frame ({error})")
        finally:
            self._fail(f"the connection closed ({self._socket.close_code})")

    def _fail(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EndpointError(f"lost the inference server {self._url}: {why}"))


def _no_answer(url: str, error: Exception) -> EndpointError:
    return EndpointError(
        f"no answer from the inference server at {url}: {type(error).__name__}: {error}"
    )


def encoded_params(sampling: Sampling, stop_token_ids: Sequence[int]) -> msgspec.Raw:
    """Return `sampling` in vLLM's terms, asking for the log-prob of each sampled token."""
    params = {
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
    return msgspec.Raw(_ENCODER.encode(params))


def parse_reply(reply: TokenReply, base_url: str) -> Generation:
    """Read one reply; raises EndpointError when tokens and log-probs do not match."""
    if reply.error:
        raise EndpointError(f"{base_url} refused a request: {reply.error}")
    if reply.finish_reason not in ("stop", "length"):
        raise EndpointError(
            f"{base_url} ended a request with finish_reason {reply.finish_reason!r}; "
            "expected 'stop' or 'length'"
        )
    token_ids = cast("array[int]", column("i", reply.token_ids))
    logprobs = cast("array[float]", column("f", reply.logprobs))
    if len(logprobs) != len(token_ids) or not token_ids:
        raise EndpointError(
            f"{base_url} returned {len(token_ids)} tokens with {len(logprobs)} log-probs; "
            "one log-prob per token was expected"
        )
    versions = [parse_version(span.version) for span in reply.versions]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=cast(Literal["stop", "length"], reply.finish_reason),
        oldest_version=min(versions, default=0),
        newest_version=max(versions, default=0),
    )


def parse_version(text: str) -> WeightVersion:
    """Return the version a server reports; before the first update it says `default`."""
    return 0 if text == "default" else int(text)
