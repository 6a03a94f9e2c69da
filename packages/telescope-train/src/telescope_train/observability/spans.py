"""The activities of one trainer rank with their times, for the timeline of the run.

GPU work continues after the calls that start it, so it is timed by events in its stream, which cost
microseconds and wait for nothing. Without these events GPU work has no spans, because the time to
start work says nothing about its length. On a CPU, a call returns when its work is done.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from telescope_train.observability.timeline import MeasuredSpan, TakenSpans

_MOST_KEPT = 100_000
"""Most spans that wait to be fetched; older ones are dropped."""


class SpanRecorder:
    """Measures the spans of one rank. `take` may be called from another thread."""

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        times_gpu: bool = True,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`device`: that of the rank. `times_gpu`: time GPU work by the GPU's clock.

        `moved` is called for each span that has ended. For work without a span, such as reading a
        tensor, the code that does the work calls it.
        """
        self.moved = moved
        self.step: int | None = None
        """The present step of the rank."""
        self._is_gpu = device is not None and device.type == "cuda"
        self._device = device if self._is_gpu and times_gpu else None
        self._ended: deque[MeasuredSpan] = deque(maxlen=_MOST_KEPT)
        self._on_gpu: deque[_GpuSpan] = deque(maxlen=_MOST_KEPT)
        self._base: _Base | None = None

    def begin(self, step: int | None) -> None:
        """Assign spans from now on to `step`."""
        self.step = step
        if self._device is not None:
            # The stream is idle between two steps. Its clock is compared with that of the CPU once
            # in each, because events tell times in a float32.
            torch.cuda.current_stream(self._device).synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._base = _Base(event, time.monotonic())

    @contextmanager
    def span(
        self, name: str, *, microbatch: int | None = None, on_cpu: bool = False
    ) -> Generator[None]:
        """Measure the block; `on_cpu`: by the CPU's clock, because the block waits for a GPU."""
        with self._measured(name, microbatch=microbatch, on_cpu=on_cpu):
            yield
        self.moved()

    @contextmanager
    def _measured(self, name: str, *, microbatch: int | None, on_cpu: bool) -> Generator[None]:
        if self._is_gpu and self._base is None and not on_cpu:
            yield
            return
        if self._base is None or on_cpu:
            begin_s = time.monotonic()
            try:
                yield
            finally:
                duration_s = time.monotonic() - begin_s
                self._ended.append(MeasuredSpan(name, begin_s, duration_s, self.step, microbatch))
            return
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._on_gpu.append(_GpuSpan(name, self._base, begin, end, self.step, microbatch))

    def take(self) -> TakenSpans:
        """Return the spans that ended since the last call."""
        spans: list[MeasuredSpan] = []
        # Other threads only append, so that what is there can be taken without a lock.
        while self._ended:
            spans.append(self._ended.popleft())
        while self._on_gpu and self._on_gpu[0].end.query():
            spans.append(self._on_gpu.popleft().measured())
        return TakenSpans(time.monotonic(), spans)


class SilentRecorder(SpanRecorder):
    """Measures nothing."""

    def begin(self, step: int | None) -> None:
        """Do nothing."""

    @contextmanager
    def span(
        self, name: str, *, microbatch: int | None = None, on_cpu: bool = False
    ) -> Generator[None]:
        """Run the block."""
        yield


class _Base(NamedTuple):
    """The same moment on two clocks."""

    event: Any
    time_s: float


class _GpuSpan(NamedTuple):
    """A span between two events, which may not have happened yet."""

    name: str
    base: _Base
    begin: Any
    end: Any
    step: int | None
    microbatch: int | None

    def measured(self) -> MeasuredSpan:
        """Return the span in seconds; both events have happened."""
        begin_s = self.base.time_s + self.base.event.elapsed_time(self.begin) / 1e3
        duration_s = self.begin.elapsed_time(self.end) / 1e3
        return MeasuredSpan(self.name, begin_s, duration_s, self.step, self.microbatch)
