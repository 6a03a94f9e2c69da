"""`Tracking`: the trackers of a run, each in a thread of its own that the run never waits for.

    after each step  -->  a bounded queue  -->  thread  -->  Tracker

A tracker that raises or hangs is said once and left out. A run that ends waits for trackers that
still have something to send, for a bounded time.
"""

import queue
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any

from telescope_core.records import RunFolder
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.trackers.log_uploads import LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, Tracker

MOST_WAITING = 1000
"""Steps that a tracker may be behind."""
END_S = 30.0
"""Seconds that a run waits at its end for a tracker."""
SAMPLES_EVERY = 10
"""Steps between two samples of rollouts."""
NUM_SAMPLES = 8
_NOTHING: Mapping[str, LogUploads] = {}
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
_MASK = "(left out)"


class Tracking:
    """Tells all trackers of a run what happens. Call `close` at the end."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        *,
        say: Callable[[str], None],
        uploads: Mapping[str, LogUploads] = _NOTHING,
    ) -> None:
        """`trackers` by name. `say` tells a person that one has failed; any thread may call it.

        `uploads`: the logs that a tracker gets at the end, by its name.
        """
        masked = replace(run, config=without_secrets(run.config))
        self._threads = [
            _Tracked(name, one, masked, say, uploads.get(name)) for name, one in trackers.items()
        ]
        self._meters: dict[str, tuple[float, int]] = {}
        self._holding = Lock()

    def meter(self, sample: GaugeSample) -> None:
        """Take a reading; its mean since the step before goes with the next step."""
        with self._holding:
            total, count = self._meters.get(sample.name, (0.0, 0))
            self._meters[sample.name] = (total + sample.value, count + 1)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of a step."""
        with self._holding:
            meters, self._meters = self._meters, {}
        numbers = {
            **{f"meter/{name}": total / count for name, (total, count) in meters.items()},
            **{
                name: float(value)
                for name, value in row.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            },
        }
        for one in self._threads:
            one.row(int(row["step"]), numbers)

    def close(self, state: str) -> None:
        """Tell the end of the run, and wait for what is still to be sent."""
        for one in self._threads:
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
        say: Callable[[str], None],
        uploads: LogUploads | None,
    ) -> None:
        self._name = name
        self._tracker = tracker
        self._run = run
        self._say = say
        self._uploads = uploads
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._ends = False
        self._put(lambda: tracker.begin(run))
        self._thread.start()

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step, and sometimes its rollouts."""
        self._put(lambda: self._tracker.log_metrics(step, numbers))
        if step == 1 or step % SAMPLES_EVERY == 0:
            self._put(lambda: self._samples(step))

    def end(self, state: str) -> None:
        """Take the end of the run."""

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
            work = self._waiting.get()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
                self._fail(f"{type(error).__name__}: {error}")

    def _send_logs(self) -> None:
        if self._uploads is None:
            return
        try:
            with TemporaryDirectory() as place:
                if paths := self._uploads.pack(Path(place)):
                    self._tracker.log_files(paths)
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
            self._say(
                f"the tracker {self._name} did not take the logs of the run: "
                f"{type(error).__name__}: {error}. They are in {self._uploads.folder}"
            )

    def _samples(self, step: int) -> None:
        rows = RunFolder(self._run.folder).rollouts([step], with_tokens=False)
        self._tracker.log_rollouts(step, rows[:NUM_SAMPLES])

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(
                f"the tracker {self._name} is left out from now on: {why}. The run goes on, and "
                "its folder has everything"
            )


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which what may be a secret is masked."""
    return {name: _masked(name, value) for name, value in settings.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_masked(name, one) for one in value]
    is_secret = isinstance(value, str) and value and _SECRET.search(name)
    return _MASK if is_secret else value
