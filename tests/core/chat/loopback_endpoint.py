"""A small chat endpoint on loopback that answers from a script, and a client of it."""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web

from telescope_core.chat.client import ChatClient
from telescope_core.types import Message, Sampling

SAMPLING = Sampling(max_tokens=8, temperature=0.5, stop=("x",), seed=3, top_k=4)
ASK = (Message(role="user", content="hi"),)


def reply(content="hello", finish_reason="stop", **message):
    return {
        "choices": [
            {
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": finish_reason,
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }


class Endpoint:
    """Answers with `script` in turn, and for ever with its last entry.

    A dict is a reply, a number a status, text a body, and "drop" a closed line; a function of the
    request gives a reply, or a status and its body.
    """

    def __init__(self, script, models=("tiny",)):
        self.script = list(script)
        self.models = models
        self.requests = []
        self.headers = []
        self.dropped = asyncio.Event()
        self.arrived = asyncio.Event()

    async def chat(self, request):
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        action = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(action):
            action = action(self.requests[-1])
        if isinstance(action, tuple):
            return web.Response(status=action[0], text=action[1])
        if action == "hang":
            self.arrived.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.dropped.set()
        if action == "drop":
            request.transport.close()
            return web.Response()
        if isinstance(action, int):
            return web.json_response({"error": "busy"}, status=action, headers={"Retry-After": "0"})
        if isinstance(action, str):
            return web.Response(text=action)
        return web.json_response(action)

    async def list(self, request):
        if self.models is None:
            return web.Response(status=404)
        if isinstance(self.models[0], int):
            return web.Response(status=self.models[0], text=self.models[1])
        return web.json_response({"data": [{"id": model} for model in self.models]})


@asynccontextmanager
async def serving(*script, models=("tiny",), **options):
    endpoint = Endpoint(script, models)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    app.router.add_get("/v1/models", endpoint.list)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = ChatClient(f"http://127.0.0.1:{port}/v1/", **options)
    try:
        yield endpoint, client
    finally:
        await client.close()
        await runner.cleanup()


async def ask(client, messages=ASK, **options):
    return await client.policy("r").complete(messages, SAMPLING, **options)
