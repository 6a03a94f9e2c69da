"""`Tracking`: the trackers of a run, each in its own thread that the run never waits for.

    after each step  -->  a bounded queue  -->  thread  -->  Tracker

A tracker that raises or hangs is said once and left out. A run that ends waits for trackers that
still have something to send, for a bounded time.
"""

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeVar

from telescope_core.base.secret_names import without_secrets
from telescope_core.records import RunFolder
from telescope_core.records.rows import RolloutRow
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.eval_numbers import step_numbers
from telescope_train.observability.trackers.log_uploads import NOTHING, LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, Tracker

MOST_WAITING = 1000
"""Most steps that a tracker may be behind."""
END_S = 30.0
"""Seconds at the end of a run to wait for a tracker."""
MOST_SOURCES = 16
"""Most sources with curves of their own; beyond that, only totals are drawn."""
SAMPLES_EVERY = 10
"""Steps between two samples of rollouts."""
NUM_SAMPLES = 8
LOGS_EVERY_S = 300.0
"""Seconds between uploads of the logs of a running run."""
LOGS_SHARE = 0.05
"""Share of a tracker thread's time for the logs of a running run."""
One = TypeVar("One")
_NOTHING: Mapping[str, LogUploads] = {}


class StepMeters:
    """Collects readings between steps; any thread may call it.

    Each meter of each source is averaged. Over all sources there are the totals that make sense for
    the meter, so that an idle machine does not hide a full one:

        meter/NAME/sum           throughput, and requests
        meter/NAME/mean, /max    shares, memory, temperatures, latencies, and everything else
        meter/NAME/SOURCE        each source by itself, up to `MOST_SOURCES` of them
    """

    def __init__(self, prefix: str = "meter") -> None:
        self._prefix = prefix
        self._found: dict[str, dict[str, tuple[float, int]]] = {}
        """Meter -> source -> (sum of its readings, their number)."""
        self._holding = Lock()

    def add(self, sample: GaugeSample) -> None:
        """Take a reading."""
        with self._holding:
            of_meter = self._found.setdefault(sample.name, {})
            total, count = of_meter.get(sample.source, (0.0, 0))
            of_meter[sample.source] = (total + sample.value, count + 1)

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call."""
        with self._holding:
            found, self._found = self._found, {}
        numbers: dict[str, float] = {}
        for name, of_meter in found.items():
            means = {source: total / count for source, (total, count) in of_meter.items()}
            if _adds_up(name):
                numbers[f"{self._prefix}/{name}/sum"] = sum(means.values())
            else:
                numbers[f"{self._prefix}/{name}/mean"] = sum(means.values()) / len(means)
                numbers[f"{self._prefix}/{name}/max"] = max(means.values())
            if len(means) <= MOST_SOURCES:
                of_sources = {f"{self._prefix}/{name}/{of}": mean for of, mean in means.items()}
                numbers |= of_sources
        return numbers


class Second(NamedTuple):
    """The readings of all meters in one second."""

    time_s: int
    """Seconds since 1970, UTC."""
    numbers: dict[str, float]


class SecondMeters:
    """Collects readings, second by second; only one thread at a time may call it.

    Named gauge/..., because they have a time axis of their own.
    """

    def __init__(self) -> None:
        self._meters = StepMeters("gauge")
        self._time_s: int | None = None

    def add(self, sample: GaugeSample) -> Second | None:
        """Add a reading; returns the previous second when a new one begins."""
        time_s = int(sample.time_s)
        done = self.take() if self._time_s is not None and time_s > self._time_s else None
        # A reading that comes late counts in the second that is being collected.
        self._time_s = max(time_s, self._time_s or time_s)
        self._meters.add(sample)
        return done

    def take(self) -> Second | None:
        """Return the readings since the last complete second; None = there are none."""
        if self._time_s is None or not (numbers := self._meters.take()):
            return None
        return Second(self._time_s, numbers)


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
        numbers = self._meters.take() | step_numbers(row)
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
            except BaseException as error:  # noqa: BLE001 - also a prompt's end of input
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
        folder = RunFolder(self._run.folder)
        if not folder.rollouts_path.is_dir():
            return  # Supervised training has none.
        rows = folder.rollouts([step], with_tokens=False)
        self._tracker.log_rollouts(step, spread(rows, NUM_SAMPLES))

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._warn(
                f"the tracker {self._name} is left out from now on: {why.rstrip('.')}. The run "
                "goes on, and its folder has everything"
            )


def spread(rows: Sequence[RolloutRow], num_rows: int) -> list[RolloutRow]:
    """Return up to `num_rows` rows.

    Environments take turns; within one, no group has its second rollout before all have their
    first.
    """
    environments: dict[str, dict[str, list[RolloutRow]]] = {}
    for row in rows:
        environments.setdefault(row.environment, {}).setdefault(row.group_id, []).append(row)
    return _in_turns(_in_turns(groups.values()) for groups in environments.values())[:num_rows]


def _in_turns(lists: Iterable[Sequence[One]]) -> list[One]:
    """Return the first of each, then the second of each, and so on."""
    left_over = object()
    rounds = zip_longest(*lists, fillvalue=left_over)
    return [one for one in chain.from_iterable(rounds) if one is not left_over]


def _adds_up(name: str) -> bool:
    return name.endswith("_per_s") or "/requests_" in name
