"""A server of OpenEnv that is gone while the policy answers."""

from aiohttp import web
from tests.asking import ask

from telescope_adapters.openenv import OpenEnvEnvironment
from telescope_core import RolloutStatus
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

SCHEMA = {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}


async def test_that_it_is_gone_is_told_and_its_connection_is_closed():
    sessions: list[web.Request] = []

    async def schema(request: web.Request) -> web.Response:
        return web.json_response(SCHEMA)

    async def session(request: web.Request) -> web.WebSocketResponse:
        sessions.append(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json({"type": "observation", "data": {"observation": {"text": "hello"}}})
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environment = OpenEnvEnvironment.from_settings(
        {"id": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    )
    client = InProcessEnvironment(environment, name="served")

    class Policy:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            (request,) = sessions
            (connection,) = environment.session.connector._acquired
            is_lost = connection.closed
            request.transport.abort()
            await is_lost
            return await ScriptedClient(["x"]).policy("r").complete(messages, sampling)

    rollout = await client.play(ask(), Policy())
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.status_reason == "EndpointError", rollout.error
    assert not environment.session.connector._acquired
    await client.close()
    await runner.cleanup()
