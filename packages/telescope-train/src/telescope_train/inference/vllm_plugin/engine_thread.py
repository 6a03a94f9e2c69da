"""vLLM's engine in a thread of the API server instead of in a process of its own.

vLLM runs its engine in another process, and the two exchange requests and tokens as MessagePack
over ZeroMQ. With a GPU, the server's work is hidden behind the engine's. On CPU both compete for
the same cores, and encoding and decoding the log-probs of every token costs as much as computing
them. Here the engine is a thread, and objects are handed over as they are.

The event loop queues requests and aborts, and awaits one step of the engine's thread at a time.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
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
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from telescope_train.inference.vllm_plugin.request_stats import MeasuredRequest, StepStats
from telescope_train.inference.wire import VersionSpan

logger = init_logger("vllm.telescope")
_IDLE_S = 0.001
"""Seconds for which the engine releases the interpreter when no request can run."""


@dataclass(slots=True)
class GrowingCompletion:
    """The sampled tokens of one request; grows with each step of the engine until it ends."""

    request_id: str
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """[T] int32."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """[T] float32, nats: log-probs under the distribution that was sampled from."""
    versions: list[VersionSpan] = field(default_factory=list)
    """Versions of the weights for the tokens, in order."""
    finish_reason: str = ""
    """`stop`, `length`, `abort` or `error`; empty until the request ends."""
    measured: MeasuredRequest | None = None
    """The measurements; None = the server makes none."""

    def add(self, output: EngineCoreOutput, version: str | None) -> None:
        """Append the tokens that a step with weight version `version` sampled."""
        if output.new_token_ids:
            if version is not None and (not self.versions or self.versions[-1].version != version):
                self.versions.append(VersionSpan(version, len(self.token_ids)))
            self.token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                # vLLM returns the sampled token's log-prob in the first column, even where the
                # token is not among the most likely ones.
                self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)


class GrowingCompletions:
    """The growing completions in an engine, by request id, which bypass vLLM's output processor.

    That one detokenizes, matches stop strings and keeps an object per token for its log-prob. A
    request of the token plane without stop strings needs none of it: its tokens and log-probs are
    written to columns as soon as they are sampled. The step of the engine decides their version.
    """

    # Only the engine's thread uses this, so no lock is needed. A completion goes to the event loop
    # only after it has ended, and nothing writes to it any more.
    def __init__(self) -> None:
        self._growing: dict[str, GrowingCompletion] = {}
        self._ended: list[GrowingCompletion] = []

    def watch(self, completion: GrowingCompletion) -> None:
        """Collect the tokens of `completion` from now on."""
        self._growing[completion.request_id] = completion

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the completions of aborted requests."""
        for request_id in request_ids:
            self._growing.pop(request_id, None)

    def take(
        self,
        outputs: list[EngineCoreOutput],
        version: str | None,
        stats: StepStats | None = None,
    ) -> list[EngineCoreOutput]:
        """Take a step's outputs; returns those that belong to no completion.

        Those of measured completions are counted in `stats`.
        """
        others: list[EngineCoreOutput] = []
        for output in outputs:
            completion = self._growing.get(output.request_id)
            if completion is None:
                # It belongs to vLLM's own routes or has stop strings, so it goes to the output
                # processor.
                others.append(output)
                continue
            completion.add(output, version)
            if stats is not None and completion.measured is not None:
                stats.add(completion.measured, output)
            if completion.finish_reason:
                self._ended.append(self._growing.pop(output.request_id))
        return others

    def ended(self) -> list[GrowingCompletion]:
        """Return the completions that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


class HeldOutputs:
    """Holds the tokens of a request that needs only its final output until it ends.

    The API server processes every output it gets, and one output with all tokens costs it little
    more than one with a single token. A change of the weight version releases the tokens that
    were sampled before it, so that each token keeps its version.
    """

    # Only the engine's thread calls this class, so no lock is needed.

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}
        self._version: str | None = None

    def watch(self, request: EngineCoreRequest) -> None:
        """Hold the outputs of `request`, unless its tokens are streamed."""
        params = request.sampling_params
        # Stop strings are matched by the output processor, which then aborts the request. If it
        # got the tokens only at the end, the engine would go on sampling past the stop string.
        if params is None or params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return
        self._parts[request.request_id] = []

    def forget(self, request_ids: list[str]) -> None:
        """Drop the held tokens of aborted requests."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)

    def release(self, step: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """Take a step's outputs; returns those to be passed on now."""
        earlier: list[EngineCoreOutputs] = []
        # vLLM notes one weight version for all tokens of an `EngineCoreOutputs`. Tokens of two
        # versions must therefore not travel in the same one.
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
    """Return one output with the tokens and log-probs of successive `parts` of one request.

    The last part is changed in place: only it carries the reason why the request ended.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    # vLLM attaches these to the first output after the prompt was computed, not to the last.
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


def install() -> None:
    """Make vLLM create an `EngineThreadClient` for every async engine of this process."""
    EngineCoreClient.make_async_mp_client = staticmethod(_make_client)  # type: ignore[assignment]


def _make_client(
    vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: Any
) -> "EngineThreadClient":
    return EngineThreadClient(vllm_config, executor_class, log_stats)


class EngineStep(NamedTuple):
    """The results of one step of the engine."""

    outputs: list[EngineCoreOutputs]
    """Outputs for vLLM's output processor."""
    completions: list[GrowingCompletion]
    """Completions that ended, for the callers that wait for them."""
    has_more: bool
    """Whether there is work for another step."""
    stats: IterationStats | None = None
    """Counts for requests that bypass the output processor; None = nothing."""


class EngineThread(EngineCore):
    """The engine with queues and aborts, which vLLM's engine process would add.

    All methods run in the engine's thread, except `put` and `abort`, which any thread may call.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        super().__init__(vllm_config, executor_class, log_stats)
        # Appending to a deque and taking from it are atomic, so the event loop can queue requests
        # without a lock while a step runs.
        self._inbox: deque[tuple[EngineCoreRequest, GrowingCompletion | None]] = deque()
        self._aborts: deque[list[str]] = deque()
        self._completions = GrowingCompletions()
        self._held = HeldOutputs()
        self._ready: list[EngineCoreOutputs] = []

    def put(self, request: EngineCoreRequest, completion: GrowingCompletion | None = None) -> None:
        """Schedule `request` before the next step; its tokens go to `completion` if given."""
        self._inbox.append((request, completion))

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests before the next step."""
        self._aborts.append(request_ids)

    def turn(self) -> EngineStep:
        """Process the queues, and step once."""
        self._admit()
        outputs, model_executed = self.step_fn()
        self.post_step(model_executed)
        found: IterationStats | None = None
        # Outputs are keyed by client, and this process is client 0, the only one.
        if outputs and 0 in outputs:
            step = outputs[0]
            stats = StepStats(step.timestamp)
            step.outputs = self._completions.take(step.outputs, step.weight_version, stats)
            found = stats.found
            self._ready += self._held.release(step)
        ready, self._ready = self._ready, []
        has_work = self.scheduler.has_requests() or bool(self.batch_queue)
        if has_work and not model_executed:
            # The requests wait for another thread, for example for one that compiles a grammar.
            # Stepping on without a pause would take the interpreter away from it.
            time.sleep(_IDLE_S)
        has_more = has_work or bool(self._inbox) or bool(self._aborts)
        return EngineStep(ready, self._completions.ended(), has_more, found)

    def pause_scheduler(
        self, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> Future[None] | None:
        """Pause as vLLM's engine process does; `wait` is refused, because nothing would step."""
        if mode == "abort":
            # Requests that are still queued are taken in first, so that they are aborted as well
            # and not sampled after the pause.
            self._admit()
            self._abort_all()
        return super().pause_scheduler(mode, clear_cache)

    def _abort_all(self) -> None:
        """Abort every request and end its output or completion."""
        aborted = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._held.forget([request.request_id for request in aborted])
        self._end([request.request_id for request in aborted], FinishReason.ABORT)

    def _end(self, request_ids: list[str], reason: FinishReason) -> None:
        # They leave with the next step. There always is one: requests are taken in right before
        # a step, and after a pause `call_utility_async` asks for one.
        ends = [EngineCoreOutput(one, [], finish_reason=reason) for one in request_ids]
        if ends := self._completions.take(ends, None):
            self._ready.append(EngineCoreOutputs(outputs=ends))

    def _admit(self) -> None:
        """Add the queued requests, then carry out the queued aborts."""
        # In this order, because an abort may be queued right behind its own request. Carried out
        # first, it would find nothing, and the request would run to its end for nobody.
        while self._inbox:
            request, completion = self._inbox.popleft()
            # Watched before it is added, so that an error below reaches its caller.
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
        # Nothing is reported for these: whoever aborts a request no longer waits for it.
        while self._aborts:
            request_ids = self._aborts.popleft()
            self.abort_requests(request_ids)
            self._completions.forget(request_ids)
            self._held.forget(request_ids)


class EngineThreadClient(AsyncMPClient):
    """Offers vLLM's `AsyncLLM` the calls of its multi-process client, without another process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        engine_class: type[EngineThread] = EngineThread,
    ) -> None:
        # The constructor of the base class is not called, because it opens sockets and starts
        # processes. The attributes set here are those that the rest of it and vLLM read;
        # `engine_dead` makes vLLM's health check answer 503.
        self.vllm_config = vllm_config
        self.resources: Any = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.client_index = 0
        # With one worker, a call to the engine waits for the step in progress. The weights, their
        # version and the pause state therefore change only between two steps.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        # Created in the thread that will run it, because torch keeps the number of threads and the
        # autograd mode per thread.
        self._engine = self._thread.submit(
            engine_class, vllm_config, executor_class, log_stats
        ).result()
        self._ready: deque[EngineCoreOutputs] = deque()
        self._awaited: dict[str, asyncio.Future[GrowingCompletion]] = {}
        self._has_work = asyncio.Event()
        self.on_stats: Callable[[IterationStats], None] = lambda stats: None
        """Called in the event loop with counts for requests that bypass the output processor."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine after its present step, without waiting for that. Idempotent."""
        if self.resources.engine_dead:
            return
        # Set first, so that no request is queued for an engine that will not step again. vLLM
        # calls this on the event loop, where waiting for the step would block the last replies.
        self.resources.engine_dead = True
        self._thread.submit(self._engine.shutdown)
        self._thread.shutdown(wait=False)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs; steps the engine as long as it has work.

        vLLM's output handler calls this in a loop. The engine steps nowhere else.
        """
        while not self._ready:
            await self._has_work.wait()
            # Cleared before the step and not after it: whatever is queued during the step sets the
            # event again, so no request is left without a step.
            self._has_work.clear()
            try:
                turn: EngineStep = await self._in_thread(self._engine.turn)
            except Exception as error:
                # The output handler passes this error on to the requests that it knows. It does
                # not know those that bypass it, and they would wait forever.
                self.resources.engine_dead = True
                logger.exception("the engine failed")
                for future in self._awaited.values():
                    if not future.done():
                        future.set_exception(EngineDeadError())
                raise EngineDeadError from error
            if turn.stats is not None:
                self.on_stats(turn.stats)
            for completion in turn.completions:
                # It is gone or done if its caller was canceled while the step ran.
                future = self._awaited.get(completion.request_id)
                if future is not None and not future.done():
                    future.set_result(completion)
            self._ready.extend(one for one in turn.outputs if one.outputs or one.scheduler_stats)
            if turn.has_more:
                self._has_work.set()
        return self._ready.popleft()

    async def complete(self, request: EngineCoreRequest, completion: GrowingCompletion) -> None:
        """Run `request` to its end, bypassing the output processor; canceling the call aborts it.

        Its tokens are added to `completion`, which has the request's id.

        Stop strings are not matched, because that requires text. Raises EngineDeadError if the
        engine fails.
        """
        future = self._awaited[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            self._start(request, completion)
            await future
        except asyncio.CancelledError:
            # Nothing in this call suspends, so the abort is queued before the task ends.
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
        try:
            return await self._in_thread(getattr(self._engine, method), *args)
        finally:
            # The call may have resumed the scheduler, or aborted requests whose ends are still to
            # be handed out, also if it failed after that. Nobody else would wake
            # `get_output_async` for them.
            self._has_work.set()

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine; there is one."""
        return [await self.call_utility_async(method, *args)]

    def _start(self, request: EngineCoreRequest, completion: GrowingCompletion | None) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError
        request.client_index = 0
        self._engine.put(request, completion)
        self._has_work.set()

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
