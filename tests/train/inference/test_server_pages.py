"""A server's page of metrics is asked for no more often than it has to be."""

from aiohttp import web
from aiohttp.test_utils import TestServer

from telescope_train.inference import client as client_module
from telescope_train.inference.client import TokenClient


async def test_a_page_that_was_just_read_says_how_busy_the_server_is(monkeypatch):
    running = iter(range(1, 9))

    async def page(request):
        lines = f"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running {next(running)}\n"
        return web.Response(text=lines)

    app = web.Application()
    app.router.add_get("/metrics", page)
    async with TestServer(app) as server:
        client = TokenClient(str(server.make_url("")).rstrip("/"))
        monkeypatch.setattr(client_module, "RECENT_S", float("inf"))
        assert (await client.load()).num_running == 1
        await client.metrics_page()
        assert [(await client.load()).num_running for _ in range(2)] == [2, 2]
        monkeypatch.setattr(client_module, "RECENT_S", 0.0)
        assert (await client.load()).num_running == 3
        await client.close()
