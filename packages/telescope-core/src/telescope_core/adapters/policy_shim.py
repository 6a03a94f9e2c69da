"""`PolicyShim`: a chat endpoint on this machine whose requests name the rollout in a header.

For frameworks whose client is made once for an address, so that a rollout cannot have one of its
own. Requests are answered by `Episode.generate`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from telescope_core.environments import Episode
from telescope_core.errors import TelescopeError
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.reply import event_stream, reply_json
from telescope_core.gateway.request import read_request

MODEL = "policy"
"""Name of the model in requests and answers."""
_MAX_REQUEST_BYTES = 64 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class Playing:
    """A rollout whose framework asks here."""

    episode: Episode[Any]
    failed: list[Exception] = field(default_factory=list[Exception])
    """What the policy raised, which the framework sees as a refusal."""
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)


class PolicyShim:
    """Answers the requests of any number of rollouts."""

    def __init__(self, header: str) -> None:
        """`header` of a request names its rollout."""
        self._header = header
        self._playing: dict[str, Playing] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """Its address, once it has started."""

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def admit(self, name: str, playing: Playing) -> None:
        """Answer requests that name `name` from now on."""
        self._playing[name] = playing

    def dismiss(self, name: str) -> None:
        """Refuse requests that name `name` from now on."""
        self._playing.pop(name, None)

    @property
    def num_playing(self) -> int:
        """How many rollouts may ask."""
        return len(self._playing)

    async def _answer(self, request: web.Request) -> web.Response:
        playing = self._playing.get(request.headers.get(self._header, ""))
        if playing is None:
            return _refused(Refusal("no rollout of this name is being played", status=404))
        episode = playing.episode
        try:
            body = msgspec.json.decode(await request.read())
            asked = read_request(body, episode.sampling, model=MODEL)
            # The messages of the episode are those of the request that is answered.
            async with playing.turns:
                episode.messages[:] = asked.messages
                said = await episode.generate(tools=asked.tools)
        except Refusal as refusal:
            playing.failed.append(refusal)
            return _refused(refusal)
        except TelescopeError as error:
            # Raised again where the rollout is played; a framework tries again after a 5xx.
            playing.failed.append(error)
            return _refused(Refusal(f"{type(error).__name__}: {error}"))
        if asked.stream:
            events = event_stream(said, model=MODEL, include_usage=asked.include_usage)
            return web.Response(body=events, content_type="text/event-stream")
        return web.json_response(reply_json(said, model=MODEL))


def _refused(refusal: Refusal) -> web.Response:
    return web.json_response(refusal.as_json(), status=refusal.status)
