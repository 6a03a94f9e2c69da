"""vLLM's engine in a thread of the API server instead of in a process beside it.

vLLM runs its engine in a process of its own and sends it requests and tokens as MessagePack over
ZeroMQ. With a GPU that hides the server's work behind the engine's. On CPU both compete for the
same cores, and encoding and decoding the log-probs of every token costs as much as computing
them. Here the engine is a thread, and objects are handed over as they are.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PauseMode,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.request import RequestStatus

from telescope_train.inference.vllm_plugin.completions import GrowingCompletion, GrowingCompletions
from telescope_train.inference.vllm_plugin.held_outputs import HeldOutputs

logger = init_logger("vllm.telescope")
_IDLE_S = 0.001
"""How long to leave the interpreter to others when there are requests but none can run."""


def install() -> None:
    """Make every async engine of this process one of these."""
    EngineCoreClient.make_async_mp_client = staticmethod(_make_client)  # type: ignore[assignment]


def _make_client(
    vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: Any
) -> "EngineThreadClient":
    return EngineThreadClient(vllm_config, executor_class, log_stats)


class EngineStep(NamedTuple):
    """What one step of the engine brought."""

    outputs: list[EngineCoreOutputs]
    """For vLLM's output processor."""
    completions: list[GrowingCompletion]
    """Ended ones, for those who wait for them."""
    has_more: bool
    """Whether there is more to do."""


class EngineThread(EngineCore):
    """The engine with what its own process would add: requests in, outputs out, a draining pause.

    All methods run in one thread, but `put` and `abort`, which any thread may call.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        super().__init__(vllm_config, executor_class, log_stats)
        self._inbox: deque[tuple[EngineCoreRequest, GrowingCompletion | None]] = deque()
        self._aborts: deque[list[str]] = deque()
        self._completions = GrowingCompletions()
        self._held = HeldOutputs()
        self._ready: list[EngineCoreOutputs] = []
        self._drain: tuple[Future[None], bool] | None = None

    def put(self, request: EngineCoreRequest, completion: GrowingCompletion | None = None) -> None:
        """Schedule `request` before the next step; what is sampled goes to its `completion`."""
        self._inbox.append((request, completion))

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests before the next step."""
        self._aborts.append(request_ids)

    def turn(self) -> EngineStep:
        """Take in what arrived and step once."""
        self._admit()
        outputs, model_executed = self.step_fn()
        self.post_step(model_executed)
        if outputs and 0 in outputs:
            step = outputs[0]
            step.outputs = self._completions.take(step.outputs, step.weight_version)
            self._ready += self._held.release(step)
        self._end_drain()
        ready, self._ready = self._ready, []
        has_work = self.scheduler.has_requests() or bool(self.batch_queue)
        if has_work and not model_executed:
            time.sleep(_IDLE_S)  # a grammar is being compiled elsewhere, for example
        has_more = has_work or bool(self._inbox) or bool(self._aborts)
        return EngineStep(ready, self._completions.ended(), has_more)

    def pause_scheduler(
        self, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> Future[None] | None:
        """Pause as the base class does; `wait` completes when running requests have ended."""
        if mode == "abort":
            self._admit()
            self._abort_all()
        if mode != "wait":
            return super().pause_scheduler(mode, clear_cache)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self._drain = (Future(), clear_cache)
        future = self._drain[0]
        self._end_drain()
        return future

    def _end_drain(self) -> None:
        if self._drain is None or self.scheduler.has_requests() or self.batch_queue:
            return
        (future, clear_cache), self._drain = self._drain, None
        self._finish_pause(clear_cache)
        future.set_result(None)

    def _abort_all(self) -> None:
        """Abort every request and tell those who wait for them."""
        aborted = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._held.forget([request.request_id for request in aborted])
        self._end([request.request_id for request in aborted], FinishReason.ABORT)

    def _end(self, request_ids: list[str], reason: FinishReason) -> None:
        ends = [EngineCoreOutput(one, [], finish_reason=reason) for one in request_ids]
        if ends := self._completions.take(ends, None):
            self._ready.append(EngineCoreOutputs(outputs=ends))

    def _admit(self) -> None:
        """Add what arrived, then abort."""
        while self._inbox:
            request, completion = self._inbox.popleft()
            if completion is not None:
                self._completions.watch(completion)
            try:
                self.add_request(*self.preprocess_add_request(request))
            except Exception:
                logger.exception("cannot add request %s", request.request_id)
                self._end([request.request_id], FinishReason.ERROR)
                continue
            if completion is None:
                self._held.watch(request)
        while self._aborts:
            request_ids = self._aborts.popleft()
            self.abort_requests(request_ids)
            self._completions.forget(request_ids)
            self._held.forget(request_ids)


class EngineThreadClient(AsyncMPClient):
    """What vLLM's `AsyncLLM` talks to: the calls of its multi-process client, without a process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        engine_class: type[EngineThread] = EngineThread,
    ) -> None:
        # The base class opens sockets and starts processes: its constructor is left out.
        self.vllm_config = vllm_config
        self.resources: Any = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.client_index = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        # In the thread that will run it: thread counts and autograd modes belong to a thread.
        self._engine = self._thread.submit(
            engine_class, vllm_config, executor_class, log_stats
        ).result()
        self._ready: deque[EngineCoreOutputs] = deque()
        self._awaited: dict[str, asyncio.Future[GrowingCompletion]] = {}
        self._has_work = asyncio.Event()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine behind the step it is in; does not wait for it. Idempotent."""
        if self.resources.engine_dead:
            return
        self.resources.engine_dead = True
        self._thread.submit(self._engine.shutdown)
        self._thread.shutdown(wait=False)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs; steps the engine as long as there is something to do."""
        while not self._ready:
            await self._has_work.wait()
            self._has_work.clear()
            try:
                turn: EngineStep = await self._in_thread(self._engine.turn)
            except Exception as error:
                self.resources.engine_dead = True
                logger.exception("the engine failed")
                for future in self._awaited.values():
                    if not future.done():
                        future.set_exception(EngineDeadError())
                raise EngineDeadError from error
            for completion in turn.completions:
                future = self._awaited.get(completion.request_id)
                if future is not None and not future.done():
                    future.set_result(completion)
            self._ready.extend(one for one in turn.outputs if one.outputs or one.scheduler_stats)
            if turn.has_more:
                self._has_work.set()
        return self._ready.popleft()

    async def complete(self, request: EngineCoreRequest) -> GrowingCompletion:
        """Run `request` to its end, past the output processor; cancelling aborts it.

        Stop strings are not matched: that takes text. Raises EngineDeadError.
        """
        future = self._awaited[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            self._start(request, GrowingCompletion(request.request_id))
            return await future
        except asyncio.CancelledError:
            await self.abort_requests_async([request.request_id])
            raise
        finally:
            del self._awaited[request.request_id]

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start `request` with the next step."""
        self._start(request, None)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop requests with the next step."""
        if request_ids and not self.resources.engine_dead:
            self._engine.abort(request_ids)
            self._has_work.set()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine between two steps."""
        result = await self._in_thread(getattr(self._engine, method), *args)
        # It may have resumed the scheduler, or paused it until what is running has ended.
        self._has_work.set()
        if isinstance(result, Future):
            return await asyncio.wrap_future(result)
        return result

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the only engine there is."""
        return [await self.call_utility_async(method, *args)]

    def _start(self, request: EngineCoreRequest, completion: GrowingCompletion | None) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError
        request.client_index = 0
        self._engine.put(request, completion)
        self._has_work.set()

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
