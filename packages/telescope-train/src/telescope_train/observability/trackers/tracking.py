"""`Tracking`: the trackers of a run, each in its own thread that the run never waits for.

    after each step  -->  a bounded queue  -->  thread  -->  Tracker

A tracker that raises or hangs is said once and left out. A run that ends waits for trackers that
still have something to send, for a bounded time.
"""

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from telescope_core.base.secret_names import without_secrets
from telescope_core.records import RunFolder
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.trackers.log_uploads import NOTHING, LogUploads
from telescope_train.observability.trackers.samples import spread
from telescope_train.observability.trackers.step_meters import (
    Second,
    SecondMeters,
    StepMeters,
)
from telescope_train.observability.trackers.tracker import TrackedRun, Tracker

MOST_WAITING = 1000
"""Most steps that a tracker may be behind."""
END_S = 30.0
"""Seconds at the end of a run to wait for a tracker."""
SAMPLES_EVERY = 10
"""Steps between two samples of rollouts."""
NUM_SAMPLES = 8
LOGS_EVERY_S = 300.0
"""Seconds between uploads of the logs of a running run."""
LOGS_SHARE = 0.05
"""Share of a tracker thread's time for the logs of a running run."""
_NOTHING: Mapping[str, LogUploads] = {}


class Tracking:
    """Passes the records of a run to all trackers. Call `close` at the end."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        *,
        warn: Callable[[str], None],
        uploads: Mapping[str, LogUploads] = _NOTHING,
    ) -> None:
        """`trackers` by name. `warn` is called, from any thread, when one has failed.

        `uploads`: by the tracker's name, the logs that it gets during the run and at its end.
        """
        masked = replace(run, config=without_secrets(run.config))
        self._threads = [
            _Tracked(name, one, masked, warn, uploads.get(name)) for name, one in trackers.items()
        ]
        self._meters = StepMeters()
        self._seconds = SecondMeters()

    def meter(self, sample: GaugeSample) -> None:
        """Add a reading, to its second and to the averages of the next step."""
        self._meters.add(sample)
        if (second := self._seconds.add(sample)) is not None:
            for one in self._threads:
                one.gauges(second)

    def row(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of a step."""
        numbers = {
            **self._meters.take(),
            **{
                name: float(value)
                for name, value in row.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            },
        }
        for one in self._threads:
            one.row(int(row["step"]), numbers)

    def eval_point(self, step: int, name: str, numbers: Mapping[str, float]) -> None:
        """Add the numbers of an eval with the weights of `step`, which may be an earlier one."""
        named = {f"eval/{name}/{key}": value for key, value in numbers.items()}
        for one in self._threads:
            one.numbers(step, named)

    def close(self, state: str) -> None:
        """Pass on the end of the run, and wait until everything is sent."""
        last = self._seconds.take()
        for one in self._threads:
            if last is not None:
                one.gauges(last)
            one.end(state)
        until_s = time.monotonic() + END_S
        for one in self._threads:
            one.wait(until_s)


class _Tracked:
    """One tracker and its thread."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        warn: Callable[[str], None],
        uploads: LogUploads | None,
    ) -> None:
        self._name = name
        self._tracker = tracker
        self._run = run
        self._warn = warn
        self._uploads = uploads
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self._logs_due_s = time.monotonic() + LOGS_EVERY_S
        self._has_refused_logs = False
        self._sent_logs = NOTHING
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._ends = False
        self._put(lambda: tracker.begin(run))
        self._thread.start()

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers of a step, and sometimes its rollouts."""
        self.numbers(step, numbers)
        if step == 1 or step % SAMPLES_EVERY == 0:
            self._put(lambda: self._samples(step))

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue numbers that belong to a step."""
        self._put(lambda: self._tracker.log_metrics(step, numbers))

    def gauges(self, second: Second) -> None:
        """Queue readings of meters; dropped while the tracker is far behind with steps."""
        if self._waiting.qsize() < MOST_WAITING // 2:
            self._put(lambda: self._tracker.log_gauges(second.time_s, second.numbers))

    def end(self, state: str) -> None:
        """Queue the end of the run."""

        def end() -> None:
            self._ends = True
            self._send_logs()
            self._tracker.end(state)

        self._put(end)

    def wait(self, until_s: float) -> None:
        """Wait until all is sent, or until a time of the monotonic clock."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it has not sent everything {END_S:g} s after the end of the run")

    def _put(self, work: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self._fail(f"it is {MOST_WAITING} messages behind")

    def _work(self) -> None:
        while not self._ends and not self._has_failed:
            work = self._next()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
                self._fail(f"{type(error).__name__}: {error}")

    def _next(self) -> Callable[[], None]:
        """Return the next task: a queued one, or the logs if they are due."""
        if self._uploads is None or self._has_refused_logs:
            return self._waiting.get()
        left_s = self._logs_due_s - time.monotonic()
        if left_s <= 0:
            return self._send_logs_so_far
        try:
            return self._waiting.get(timeout=left_s)
        except queue.Empty:
            return self._send_logs_so_far

    def _send_logs_so_far(self) -> None:
        begun_s = time.monotonic()
        self._send_logs()
        now_s = time.monotonic()
        # Logs grow, and are sent as a whole: the rarer, the longer that takes.
        self._logs_due_s = now_s + max(LOGS_EVERY_S, (now_s - begun_s) / LOGS_SHARE)

    def _send_logs(self) -> None:
        if self._uploads is None:
            return
        try:
            with TemporaryDirectory() as place:
                packed = self._uploads.pack(Path(place), self._sent_logs)
                if packed.paths:
                    self._tracker.log_files(packed.paths)
                self._sent_logs = packed.sizes
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
            if not self._has_refused_logs:
                self._has_refused_logs = True
                self._warn(
                    f"the tracker {self._name} did not take the logs of the run: "
                    f"{type(error).__name__}: {error}. They are in {self._uploads.folder}"
                )

    def _samples(self, step: int) -> None:
        rows = RunFolder(self._run.folder).rollouts([step], with_tokens=False)
        self._tracker.log_rollouts(step, spread(rows, NUM_SAMPLES))

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._warn(
                f"the tracker {self._name} is left out from now on: {why}. The run goes on, and "
                "its folder has everything"
            )
