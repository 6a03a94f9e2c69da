"""The engine's own sign of life: none while a step does not end, although the server answers."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from telescope_train.inference.vllm_plugin.engine_thread import EngineStep, EngineThreadClient
from telescope_train.inference.vllm_plugin.token_plane import TokenPlane
from telescope_train.inference.wire import ENGINE_PATH, ONCE_HEADER

# Importing vLLM takes longer than these tests.
pytestmark = pytest.mark.slow
DEADLINE_S = 60.0


class Stuck:
    """An engine whose steps do not end before they may."""

    def __init__(self, *_: Any) -> None:
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.num_asked = 0

    def put(self, *_: Any) -> None:
        """Take a request."""

    def turn(self) -> EngineStep:
        self.has_begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return EngineStep([], [], False)

    def is_scheduler_paused(self) -> bool:
        self.num_asked += 1
        return False


async def asked(plane: TokenPlane, core: Any, *, errored: bool = False) -> int:
    """Return the status with which the server answers for its engine."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read")

    engine = SimpleNamespace(engine_core=core, errored=errored)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "path": ENGINE_PATH, "app": app, "query_string": b"", "headers": []}
    await plane(scope, receive, send)
    return sent[0]["status"]


async def test_a_step_that_does_not_end_leaves_the_question_open() -> None:
    core = EngineThreadClient(None, None, False, engine_class=Stuck)  # type: ignore[arg-type]
    stuck: Any = core._engine
    plane = TokenPlane(_refuse)
    async with asyncio.timeout(DEADLINE_S):
        assert await asked(plane, core) == 200
        nothing = {"cache_salt": None, "data_parallel_rank": None}
        params = SamplingParams()
        request = EngineCoreRequest("one", [1], None, params, None, 0.0, None, **nothing)
        await core.add_request_async(request)
        outputs = asyncio.create_task(core.get_output_async())
        await asyncio.to_thread(stuck.has_begun.wait, DEADLINE_S)
        # Whoever gives up, and asks again, asks nothing more of the engine.
        given_up = asyncio.create_task(asked(plane, core))
        waiting = asyncio.create_task(asked(plane, core))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        # The event loop, and with it the server, goes round meanwhile.
        await asyncio.to_thread(lambda: None)
        assert not waiting.done()
        assert stuck.num_asked == 1
        stuck.may_end.set()
        assert await waiting == 200
        assert stuck.num_asked == 2
        outputs.cancel()
        core._thread.shutdown()


async def test_while_weights_change_the_server_answers_for_itself() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Busy:
        async def call_utility_all_async(self, method: str) -> None:
            await may_end.wait()

    async def update(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await may_end.wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    plane = TokenPlane(update)
    scope = {"type": "http", "path": "/update_weights", "headers": [(ONCE_HEADER.encode(), b"1")]}
    async with asyncio.timeout(DEADLINE_S):
        updating = asyncio.create_task(plane(scope, receive, _refuse))
        await begun.wait()
        assert await asked(plane, Busy()) == 200
        may_end.set()
        await updating
        # Afterwards it is the engine that is asked again.
        may_end.clear()
        waiting = asyncio.create_task(asked(plane, Busy()))
        await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        assert await waiting == 200


async def test_a_dead_engine_is_told_at_once() -> None:
    class Dead:
        async def call_utility_all_async(self, method: str) -> None:
            raise EngineDeadError

    assert await asked(TokenPlane(_refuse), Dead()) == 503
    # One that died while it was asked answers never: the question of before is not waited for.
    assert await asked(TokenPlane(_refuse), None, errored=True) == 503


async def _refuse(*_: Any) -> None:
    pytest.fail("this path is not vLLM's")
