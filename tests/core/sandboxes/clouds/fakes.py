"""Loopback services that speak what E2B, Daytona and Prime do; their sandboxes are local ones.

The protocols are those that the SDKs of the tested versions were seen to speak. Every sandbox that
a service is asked for is a real one, so what a program does there is what it would do.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.sandboxes.local.sandbox import LocalSandbox
from telescope_core.sandboxes.protocol import CommandResult, SandboxSpec

OUTPUT = 64 << 20


class Fake:
    """What both services share: sandboxes by id, what was asked, and failures on demand."""

    def __init__(self) -> None:
        self.local = LocalProvider()
        self.boxes: dict[str, LocalSandbox] = {}
        self.created: list[dict[str, Any]] = []
        self.fails_with = 0
        """The HTTP status that everything is answered with; 0 = what is asked for is done."""
        self.refuses_key = False
        self.may_start = asyncio.Event()
        """Sandboxes that are asked for wait until it is set."""
        self.may_start.set()
        self.was_asked = asyncio.Event()
        self.url = ""

    async def box(self, asked: dict[str, Any], memory_mb: int = 512) -> str:
        self.created.append(asked)
        self.was_asked.set()
        await self.may_start.wait()
        made = await self.local.create(
            SandboxSpec(memory_mb=memory_mb, disk_mb=128, max_output_bytes=OUTPUT)
        )
        self.boxes[made.id] = made
        return made.id

    async def end(self, name: str) -> bool:
        made = self.boxes.pop(name, None)
        if made is not None:
            await made.close()
        return made is not None

    @web.middleware
    async def fail(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuses_key:
            return web.json_response({"code": 401, "message": "no such key"}, status=401)
        if status := self.fails_with:
            said = {"code": status, "message": "out of order", "detail": "out of order"}
            return web.json_response(said, status=status)
        return await handler(request)


async def last_part(request: web.Request) -> bytes:
    """The content of an upload: a form's last part, or the body."""
    if not request.content_type.startswith("multipart"):
        return await request.read()
    content = b""
    async for part in await request.multipart():
        content = bytes(await part.read(decode=True))
    return content


class FakeE2B(Fake):
    """REST for sandboxes and files; a Connect stream of JSON for commands."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v2/sandboxes", self.create),
            web.post("/sandboxes", self.create),
            web.delete("/sandboxes/{id}", self.kill),
            web.post("/process.Process/Start", self.start),
            web.get("/files", self.read),
            web.post("/files", self.write),
        ]

    async def create(self, request: web.Request) -> web.Response:
        name = await self.box(await request.json())
        about = {"sandboxID": name, "templateID": "base", "clientID": "c", "domain": None}
        return web.json_response(
            {**about, "envdVersion": "0.5.0", "envdAccessToken": "t"}, status=201
        )

    async def kill(self, request: web.Request) -> web.Response:
        return web.Response(status=204 if await self.end(request.match_info["id"]) else 404)

    def of(self, request: web.Request) -> LocalSandbox:
        return self.boxes[request.headers["E2b-Sandbox-Id"]]

    async def start(self, request: web.Request) -> web.Response:
        asked = json.loads((await request.read())[5:])["process"]
        done = await self.of(request).run([asked["cmd"], *asked.get("args", [])], timeout_s=300)
        events = [
            {"start": {"pid": 7}},
            *({"data": {kind: _base64(data)}} for kind, data in _streams(done) if data),
            {"end": {"exitCode": done.exit_code, "exited": True, "status": "exited"}},
        ]
        frames = [_frame(json.dumps({"event": event}).encode()) for event in events]
        body = b"".join(frames) + _frame(b"{}", 2)
        return web.Response(body=body, content_type="application/connect+json")

    async def read(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.of(request).read(request.query["path"]))

    async def write(self, request: web.Request) -> web.Response:
        path = request.query["path"]
        await self.of(request).write(path, await last_part(request))
        return web.json_response([{"name": path.rsplit("/", 1)[-1], "type": "file", "path": path}])


class FakePrime(Fake):
    """REST for sandboxes and files; a Connect stream of protobuf for commands."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/sandbox", self.create),
            web.post("/api/v1/sandbox/status:batchGet", self.statuses),
            web.get("/api/v1/sandbox/{id}", self.show),
            web.delete("/api/v1/sandbox/{id}", self.kill),
            web.post("/{ns}/{id}/command_session.CommandSession/Start", self.start),
            web.post("/{ns}/{id}/upload", self.upload),
        ]

    def about(self, name: str) -> dict[str, Any]:
        auth = {"gateway_url": self.url, "user_ns": "ns", "job_id": name, "token": "t"}
        size = {"cpuCores": 1, "memoryGB": 1, "diskSizeGB": 5, "gpuCount": 0, "timeoutMinutes": 5}
        texts = {"name": "n", "dockerImage": "i", "status": "RUNNING", "diskMountPath": "/"}
        when = "2026-01-01T00:00:00Z"
        return {
            **{"id": name, "createdAt": when, "updatedAt": when, **size, **texts},
            "gatewayAuth": {**auth, "expires_at": "2099-01-01T00:00:00Z"},
        }

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        memory_mb = round(float(asked["memory_gb"]) * 1024)
        return web.json_response(self.about(await self.box(asked, memory_mb)))

    async def statuses(self, request: web.Request) -> web.Response:
        names = (await request.json())["sandbox_ids"]
        rows = [{"sandbox_id": name, "status": "RUNNING"} for name in names]
        return web.json_response({"statuses": rows, "errors": []})

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(self.about(request.match_info["id"]))

    async def kill(self, request: web.Request) -> web.Response:
        ended = await self.end(request.match_info["id"])
        return web.json_response({}, status=200 if ended else 404)

    def of(self, request: web.Request) -> LocalSandbox:
        return self.boxes[request.match_info["id"]]

    async def start(self, request: web.Request) -> web.Response:
        process = dict(_fields((await request.read())[5:]))[1]
        words = [data.decode() for number, data in _fields(process) if number in (1, 2)]
        done = await self.of(request).run(words, timeout_s=300)
        end = _number(1, done.exit_code << 1) + _number(2, 1) + _bytes(3, b"exit status")
        events = [
            _bytes(1, _number(1, 7)),
            _bytes(2, _bytes(1, done.stdout)),
            _bytes(2, _bytes(2, done.stderr)),
            _bytes(3, end),
        ]
        frames = [_frame(_bytes(1, event)) for event in events]
        body = b"".join(frames) + _frame(b"{}", 2)
        return web.Response(body=body, content_type="application/connect+proto")

    async def upload(self, request: web.Request) -> web.Response:
        path, content = request.query["path"], await last_part(request)
        await self.of(request).write(path, content)
        when = "2026-01-01T00:00:00Z"
        kept = {"success": True, "path": path, "size": len(content), "timestamp": when}
        return web.json_response(kept)


class FakeDaytona(Fake):
    """REST for everything; the toolbox has an address of its own."""

    def routes(self) -> list[web.RouteDef]:
        box = "/toolbox/{id}"
        return [
            web.post("/api/sandbox", self.create),
            web.get("/api/sandbox/{id}", self.show),
            web.delete("/api/sandbox/{id}", self.kill),
            web.post(f"{box}/process/execute", self.execute),
            web.post(f"{box}/files/bulk-upload", self.upload),
            web.post(f"{box}/files/bulk-download", self.download),
        ]

    def about(self, name: str) -> dict[str, Any]:
        flags = {"public": False, "networkBlockAll": True, "kvm": False}
        size = {"cpu": 1, "gpu": 0, "memory": 1, "disk": 1}
        texts = {"organizationId": "o", "name": "n", "user": "u", "target": "eu"}
        return {
            **{"id": name, "env": {}, "labels": {}, "state": "started"},
            **{**flags, **size, **texts, "toolboxProxyUrl": f"{self.url}/toolbox"},
        }

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        memory_mb = int(asked.get("memory") or 1) * 1024
        return web.json_response(self.about(await self.box(asked, memory_mb)))

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(self.about(request.match_info["id"]))

    async def kill(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if not await self.end(name):
            return web.json_response({"message": "no such sandbox"}, status=404)
        return web.json_response(self.about(name))

    def of(self, request: web.Request) -> LocalSandbox:
        return self.boxes[request.match_info["id"]]

    async def execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        done = await self.of(request).run(["sh", "-c", asked["command"]], timeout_s=300)
        return web.json_response(
            {"exitCode": done.exit_code, "result": done.text + done.error_text}
        )

    async def upload(self, request: web.Request) -> web.Response:
        path = content = None
        async for part in await request.multipart():
            data = bytes(await part.read(decode=True))
            if part.name is not None and part.name.endswith(".path"):
                path = data.decode()
            else:
                content = data
        assert path is not None
        assert content is not None
        await self.of(request).write(path, content)
        return web.json_response({})

    async def download(self, request: web.Request) -> web.Response:
        (path,) = (await request.json())["paths"]
        content = await self.of(request).read(path)
        head = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{path}"\r\n\r\n'
        return web.Response(
            body=head.encode() + content + b"\r\n--B--\r\n",
            headers={"Content-Type": "multipart/form-data; boundary=B"},
        )


@asynccontextmanager
async def serving(fake: Fake) -> AsyncGenerator[Fake]:
    """Serve `fake` on a free port of the loopback."""
    app = web.Application(middlewares=[fake.fail], client_max_size=OUTPUT)
    app.add_routes(fake.routes())  # type: ignore[attr-defined]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
        await fake.local.close()


def _streams(done: CommandResult) -> list[tuple[str, bytes]]:
    return [("stdout", done.stdout), ("stderr", done.stderr)]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """The fields of a protobuf message that hold bytes."""
    found: list[tuple[int, bytes]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            varint()
            continue
        assert tag & 7 == 2, "numbers and bytes are all that these messages have"
        size = varint()
        found.append((tag >> 3, data[at : at + size]))
        at += size
    return found


def _frame(payload: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(payload).to_bytes(4, "big") + payload
