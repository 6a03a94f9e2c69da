"""A loopback service that speaks Modal's gRPC, from the server classes that its SDK ships."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpclib.server
from fakes import Fake
from grpclib import GRPCError, Status
from modal._utils.grpc_testing import patch_mock_servicer
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from telescope_core.sandboxes.protocol import CommandResult

Make = Callable[[Any, Any], Awaitable[Any]]


def answer(make: Make) -> Any:
    """Make a method that answers one request with one message."""

    async def method(self: Any, stream: Any) -> None:
        request = await stream.recv_message()
        if self.fake.refuses_key:
            raise GRPCError(Status.UNAUTHENTICATED, "no such token")
        if self.fake.fails_with:
            is_refusal = self.fake.fails_with == 400
            status = Status.INVALID_ARGUMENT if is_refusal else Status.FAILED_PRECONDITION
            raise GRPCError(status, "out of order")
        message = await make(self.fake, request)
        # A stream that has nothing more to send just ends.
        if message is not None:
            await stream.send_message(message)

    return method


def constant(message: Callable[[], Any]) -> Any:
    """Make a method that answers every request alike."""

    async def make(fake: Any, request: Any) -> Any:
        return message()

    return answer(make)


def token() -> str:
    """A token that is valid for an hour, as far as anybody looks."""

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'none'})}.{part({'exp': time.time() + 3600})}.x"


async def create(fake: Any, request: Any) -> Any:
    definition = request.definition
    asked = {
        "block_network": definition.network_access.network_access_type
        == api_pb2.NetworkAccess.NetworkAccessType.BLOCKED
    }
    name = await fake.box(asked, definition.resources.memory_mb_max or 512)
    access = api_pb2.CommandRouterAccess(url=fake.url, jwt=token())
    return api_pb2.SandboxCreateV2Response(
        sandbox_id=f"sb-{name}", task_id=f"ta-{name}", command_router_access=access
    )


async def terminate(fake: Any, request: Any) -> Any:
    await fake.end(request.sandbox_id.removeprefix("sb-"))
    return api_pb2.SandboxTerminateResponse()


async def start(fake: Any, request: Any) -> Any:
    box = fake.boxes[request.task_id.removeprefix("ta-")]
    words = list(request.command_args)
    fake.commands[request.exec_id] = asyncio.create_task(box.run(words, timeout_s=300))
    return router.TaskExecStartResponse()


async def wait(fake: Any, request: Any) -> Any:
    done: CommandResult = await asyncio.shield(fake.commands[request.exec_id])
    return router.TaskExecWaitResponse(code=done.exit_code)


async def read(fake: Any, request: Any) -> Any:
    done: CommandResult = await asyncio.shield(fake.commands[request.exec_id])
    is_output = request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
    data = done.stdout if is_output else done.stderr
    rest = data[request.offset :]
    return router.TaskExecStdioReadResponse(data=rest) if rest else None


def environment() -> Any:
    settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
    about = api_pb2.EnvironmentMetadata(name="main", settings=settings)
    return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=about)


def image() -> Any:
    succeeded = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
    return api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=succeeded)


def ended() -> Any:
    status = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
    return api_pb2.SandboxWaitResponse(result=api_pb2.GenericResult(status=status))


@patch_mock_servicer
class Control(ModalClientBase):
    """Apps, images and sandboxes."""

    fake: Any = None
    ClientHello = constant(lambda: api_pb2.ClientHelloResponse(image_builder_version="2025.06"))
    AuthTokenGet = constant(lambda: api_pb2.AuthTokenGetResponse(token=token()))
    AppGetOrCreate = constant(lambda: api_pb2.AppGetOrCreateResponse(app_id="ap-1"))
    EnvironmentGetOrCreate = constant(environment)
    ImageGetOrCreate = constant(image)
    SandboxCreateV2 = answer(create)
    SandboxTerminateV2 = answer(terminate)
    SandboxWaitV2 = constant(ended)


@patch_mock_servicer
class Router(TaskCommandRouterBase):
    """Commands."""

    fake: Any = None
    TaskExecStart = answer(start)
    TaskExecWait = answer(wait)
    TaskExecStdioRead = answer(read)


class FakeModal(Fake):
    """Two services at one address."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: dict[str, asyncio.Task[CommandResult]] = {}


@asynccontextmanager
async def serving_modal(fake: FakeModal) -> AsyncGenerator[FakeModal]:
    """Serve `fake` on a free port of the loopback."""
    control, commands = Control(), Router()
    control.fake = commands.fake = fake
    server = grpclib.server.Server([control, commands])
    await server.start("127.0.0.1", 0)
    assert server._server is not None
    fake.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        for command in fake.commands.values():
            command.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(*fake.commands.values(), return_exceptions=True)
        server.close()
        await fake.local.close()
