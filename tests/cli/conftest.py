"""Fixtures of the commands that play evals: a small chat endpoint on loopback, and a folder."""

import asyncio
import sys
import threading

import pytest
from aiohttp import web
from tests.cli.echo import BROKEN, ENVIRONMENT, NAMES, answer, models


@pytest.fixture
def serve_app():
    """Yield what serves an application on loopback and returns its base URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners = []

    def serve(app):
        runner = web.AppRunner(app, shutdown_timeout=1)
        runners.append(runner)

        async def start():
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return site._server.sockets[0].getsockname()[1]

        port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        return f"http://127.0.0.1:{port}/v1"

    yield serve
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


@pytest.fixture
def endpoint(serve_app):
    """Return (base URL, the application) of an endpoint that echoes even numbers."""
    app = web.Application()
    app[BROKEN] = False
    app[NAMES] = ["tiny"]
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    return serve_app(app), app


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("echo_env", None)
