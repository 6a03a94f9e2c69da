"""`PolicyShim`: a chat endpoint on this machine whose requests name the rollout in a header.

For frameworks whose client is created once for an address, so that rollouts cannot have separate
ones. Requests are answered by `Episode.generate`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from telescope_core.base.errors import TelescopeError
from telescope_core.environments import Episode
from telescope_core.gateway.chat_server import ChatServer, answer_chat, read_chat
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import read_request

MODEL = "policy"
"""Name of the model in requests and answers."""


@dataclass(slots=True, kw_only=True, eq=False)
class Playing:
    """A rollout whose framework sends requests here."""

    episode: Episode[Any]
    failed: list[Exception] = field(default_factory=list[Exception])
    """Errors of the policy, which the framework sees as refusals."""
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)


class PolicyShim:
    """Answers the requests of any number of rollouts."""

    def __init__(self, header: str) -> None:
        """`header`: name of the header with the name of the rollout."""
        self._header = header
        self._playing: dict[str, Playing] = {}
        self._server = ChatServer([("POST", "/v1/chat/completions", self._answer)])

    @property
    def base_url(self) -> str:
        """Its address, once it has started."""
        return f"{self._server.address}/v1"

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        await self._server.start()

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        await self._server.close()

    def admit(self, name: str, playing: Playing) -> None:
        """Answer requests that name `name` from now on."""
        self._playing[name] = playing

    def dismiss(self, name: str) -> None:
        """Refuse requests that name `name` from now on."""
        self._playing.pop(name, None)

    @property
    def num_playing(self) -> int:
        """Number of rollouts that may send requests."""
        return len(self._playing)

    async def _answer(self, request: web.Request) -> web.Response:
        playing = self._playing.get(request.headers.get(self._header, ""))
        if playing is None:
            raise Refusal("no rollout of this name is being played", status=404)
        episode = playing.episode
        try:
            asked = await read_chat(
                request, lambda body: read_request(body, episode.sampling, model=MODEL)
            )
            # The messages of the episode are those of the request that is answered.
            async with playing.turns:
                episode.messages[:] = asked.messages
                said = await episode.generate(tools=asked.tools)
        except Refusal as refusal:
            playing.failed.append(refusal)
            raise
        except TelescopeError as error:
            # Raised again where the rollout is played; a framework tries again after a 5xx.
            playing.failed.append(error)
            raise Refusal(f"{type(error).__name__}: {error}") from None
        return answer_chat(said, asked, model=MODEL)
