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
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
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
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

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


class EngineThread(EngineCore):
    """The engine with what its own process would add: requests in, outputs out, a draining pause.

    All methods run in one thread, but `put` and `abort`, which any thread may call.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        super().__init__(vllm_config, executor_class, log_stats)
        self._inbox: deque[EngineCoreRequest] = deque()
        self._aborts: deque[list[str]] = deque()
        self._held = HeldOutputs()
        self._ready: list[EngineCoreOutputs] = []
        self._drain: tuple[Future[None], bool] | None = None

    def put(self, request: EngineCoreRequest) -> None:
        """Schedule `request` before the next step."""
        self._inbox.append(request)

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests before the next step."""
        self._aborts.append(request_ids)

    def turn(self) -> tuple[list[EngineCoreOutputs], bool]:
        """Take in what arrived and step once. Returns (outputs, whether there is more to do)."""
        self._admit()
        outputs, model_executed = self.step_fn()
        self.post_step(model_executed)
        if outputs and 0 in outputs:
            self._ready += self._held.release(outputs[0])
        self._end_drain()
        ready, self._ready = self._ready, []
        has_work = self.scheduler.has_requests() or bool(self.batch_queue)
        if has_work and not model_executed:
            time.sleep(_IDLE_S)  # a grammar is being compiled elsewhere, for example
        return ready, has_work or bool(self._inbox) or bool(self._aborts)

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
        if ends:
            self._ready.append(EngineCoreOutputs(outputs=ends))

    def _admit(self) -> None:
        """Add what arrived, then abort."""
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self.add_request(*self.preprocess_add_request(request))
            except Exception:
                logger.exception("cannot add request %s", request.request_id)
                self._end([request.request_id], FinishReason.ERROR)
                continue
            self._held.watch(request)
        while self._aborts:
            request_ids = self._aborts.popleft()
            self.abort_requests(request_ids)
            self._held.forget(request_ids)


class HeldOutputs:
    """Keeps the tokens of a request that wants only its final output until it ends.

    The API server works through each output it gets, token by token; one output with all tokens
    costs it little more than one with a single token. A change of the weight version releases
    what was sampled before it, so that each token keeps its version.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}
        self._version: str | None = None

    def watch(self, request: EngineCoreRequest) -> None:
        """Hold the outputs of `request`, unless somebody reads them as they come."""
        params = request.sampling_params
        if params is None or params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return
        self._parts[request.request_id] = []

    def forget(self, request_ids: list[str]) -> None:
        """Drop what is held of aborted requests."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)

    def release(self, step: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """Take in a step's outputs; returns what is to be passed on now."""
        earlier: list[EngineCoreOutputs] = []
        if step.weight_version != self._version:
            earlier = self._flush()
            self._version = step.weight_version
        passed: list[EngineCoreOutput] = []
        for output in step.outputs:
            parts = self._parts.get(output.request_id)
            if parts is None:
                passed.append(output)
                continue
            parts.append(output)
            if output.finish_reason is not None:
                passed.append(merge(parts))
                del self._parts[output.request_id]
        step.outputs = passed
        return [*earlier, step]

    def _flush(self) -> list[EngineCoreOutputs]:
        held = [merge(parts) for parts in self._parts.values() if parts]
        for parts in self._parts.values():
            parts.clear()
        return [EngineCoreOutputs(outputs=held, weight_version=self._version)] if held else []


def merge(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return one output with the tokens and log-probs of successive `parts` of a request."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    last.prefill_stats = next((one.prefill_stats for one in parts if one.prefill_stats), None)
    last.new_token_ids = [token for one in parts for token in one.new_token_ids]
    last.events = [event for one in parts for event in one.events or ()] or None
    columns = [one.new_logprobs for one in parts if one.new_logprobs is not None]
    if columns:
        last.new_logprobs = LogprobsLists(
            np.concatenate([one.logprob_token_ids for one in columns]),
            np.concatenate([one.logprobs for one in columns]),
            np.concatenate([one.sampled_token_ranks for one in columns]),
        )
    return last


class EngineThreadClient(AsyncMPClient):
    """What vLLM's `AsyncLLM` talks to: the calls of its multi-process client, without a process."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        # The base class opens sockets and starts processes: its constructor is left out.
        self.vllm_config = vllm_config
        self.resources: Any = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.client_index = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        # In the thread that will run it: thread counts and autograd modes belong to a thread.
        self._engine = self._thread.submit(
            EngineThread, vllm_config, executor_class, log_stats
        ).result()
        self._ready: deque[EngineCoreOutputs] = deque()
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
                ready, has_more = await self._in_thread(self._engine.turn)
            except Exception as error:
                self.resources.engine_dead = True
                logger.exception("the engine failed")
                raise EngineDeadError from error
            self._ready.extend(one for one in ready if one.outputs or one.scheduler_stats)
            if has_more:
                self._has_work.set()
        return self._ready.popleft()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start `request` with the next step."""
        if self.resources.engine_dead:
            raise EngineDeadError
        request.client_index = 0
        self._engine.put(request)
        self._has_work.set()

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

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
