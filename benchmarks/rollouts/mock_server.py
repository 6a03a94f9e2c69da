"""A chat endpoint that answers at once from memory: `python -m rollouts.mock_server`.

It prints its port and serves until its standard input closes. It reads just enough HTTP for the
clients at hand, so that what is measured is the clients.
"""

import asyncio
import json
import re
import sys

from rollouts.problems import MODEL, NUM_PROBLEMS, reply

_STREAM = re.compile(rb'"stream": ?true')


def response(content: bytes, kind: str = "application/json") -> bytes:
    """Return `content` with its head."""
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: keep-alive\r\n\r\n"
    )
    return head.encode() + content


def stream(content: bytes) -> bytes:
    """Return a chat completion as a stream of one chunk, for clients that ask for no other."""
    fields = json.loads(content)
    for choice in fields["choices"]:
        choice["delta"] = choice.pop("message")
    chunk = json.dumps(fields | {"object": "chat.completion.chunk"}, separators=(",", ":"))
    return f"data: {chunk}\n\ndata: [DONE]\n\n".encode()


REPLIES = [response(reply(index)) for index in range(NUM_PROBLEMS)]
STREAMS = [response(stream(reply(i)), "text/event-stream") for i in range(NUM_PROBLEMS)]
MODELS = response(json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())


class Chat(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every whole request received so far."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            size = 0
            if (at := head.find(b"content-length:")) >= 0:
                size = int(head[at + 15 :].split(b"\r\n", 1)[0])
            stop = end + 4 + size
            if len(self._buffer) < stop:
                return
            body, self._buffer = self._buffer[end + 4 : stop], self._buffer[stop:]
            self._transport.write(_answer(body))


def _answer(body: bytes) -> bytes:
    at = body.find(b"Problem ")
    if at < 0:
        return MODELS
    replies = STREAMS if _STREAM.search(body) else REPLIES
    return replies[int(body[at + 8 : at + 11])]


async def serve() -> None:
    """Serve until standard input closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Chat, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
