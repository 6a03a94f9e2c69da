"""Changes on disk as events for open pages; one thread looks for them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread

import msgspec

from telescope_core.base.errors import TelescopeError
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.run_files import inside, listed
from telescope_ui.index.one_eval import OneEval
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.runs import Runs

LOOK_S = 0.25
"""Seconds between looks of the thread, while somebody listens."""
_SLOW_LOOKS = 8
"""Looks between two at a run that has ended."""
_STILL_S = 5.0
"""Seconds between signs of life; a page without one for twice as long reports that it is not
live."""
MAX_LISTENERS = 32
_MAX_WAITING = 1000
_FILES = {
    "metrics": "metrics.jsonl",
    "servers": "servers.jsonl",
    "restarts": "restarts.jsonl",
    "evals": "eval_points.jsonl",
    "summary": "summary.json",
}
_FOLDERS = ("rollouts", "attempts", "checkpoints")
_GROWING = ("events", "calls", "timeline", "gauges", "logs")
"""Folders in which the newest files grow in place."""
_NEWEST = 4

_NOTHING: JsonObject = {}
_READY = "ready"
"""Event that tells a listener that all later changes are reported: what it asked for before may
be older than a change that is not."""
_END = "end"
"""Event after which nothing more is reported."""

State = Mapping[str, object]
_OF_FILES = (OSError, TelescopeError, ValueError)
"""Errors of reading files that others write and delete."""


@dataclass(eq=False, slots=True)
class Listener:
    """One page that is notified of changes."""

    runs: Collection[str]
    """Keys of the runs on the page; empty for all."""
    loop: asyncio.AbstractEventLoop
    is_known: bool = False
    """Whether the watcher has a state to compare with, so that no change can be missed."""
    queue: "asyncio.Queue[tuple[str, JsonObject]]" = field(
        default_factory=lambda: asyncio.Queue(_MAX_WAITING)
    )


class Watcher:
    """Watches the run folders while somebody listens."""

    def __init__(self, runs: Runs, *, pause: Callable[[float], None] = time.sleep) -> None:
        """Watch `runs`, with a `pause` in seconds between two looks."""
        self._runs = runs
        self._pause = pause
        self._listening = Condition()
        """Held to access the listeners; notified when the first one arrives."""
        self._listeners: set[Listener] = set()
        self._is_closed = False
        self._thread = Thread(target=self._watch, name="watch runs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        with self._listening:
            self._is_closed = True
            self._listening.notify_all()
        self._thread.join()

    def add(self, runs: Collection[str]) -> Listener | None:
        """Return a listener of the running event loop; None if there are too many."""
        listener = Listener(runs=frozenset(runs), loop=asyncio.get_running_loop())
        with self._listening:
            if len(self._listeners) >= MAX_LISTENERS:
                return None
            self._listeners.add(listener)
            self._listening.notify_all()
        return listener

    def end(self) -> None:
        """End the events of all open pages; they ask again, as after a lost connection."""
        self._tell(_END, _NOTHING, "")

    def remove(self, listener: Listener) -> None:
        """Stop notifying `listener`."""
        with self._listening:
            self._listeners.discard(listener)

    def _watch(self) -> None:
        before: dict[str, State] = {}
        is_first = True
        look = 0
        while True:
            with self._listening:
                if not self._listeners:
                    before, is_first = {}, True
                    self._listening.wait_for(lambda: self._listeners or self._is_closed)
                if self._is_closed:
                    return
                fresh = [one for one in self._listeners if not one.is_known]
            try:
                now = self._look(before, look)
            except _OF_FILES:
                # Files come and go under the look, and disks fail for a while. The next look tells.
                now = before
            if not is_first:
                self._tell_differences(before, now)
            for listener in fresh:
                listener.is_known = True
                self._hand(listener, _READY, _NOTHING)
            before, is_first, look = now, False, look + 1
            self._pause(LOOK_S)

    def _look(self, before: Mapping[str, State], look: int) -> dict[str, State]:
        found: dict[str, State] = {}
        for run in self._runs.look():
            known = before.get(run.key)
            is_over = known is not None and known["state"] != "running"
            if known is not None and is_over and look % _SLOW_LOOKS:
                found[run.key] = known
            else:
                try:
                    found[run.key] = state_of(run)
                except _OF_FILES:
                    found[run.key] = {"state": "unreadable", "step": 0} if known is None else known
        return found

    def _tell_differences(self, before: Mapping[str, State], now: Mapping[str, State]) -> None:
        if before.keys() != now.keys():
            changed = sorted(before.keys() ^ now.keys())
            self._tell("runs", {"runs": sorted(now), "changed": changed}, "")
        for key, state in now.items():
            known = before.get(key)
            if known is None or known == state:
                continue
            parts = [part for part in state if part != "step" and state[part] != known.get(part)]
            if parts:
                self._tell("change", {"run": key, "parts": parts, "step": state["step"]}, key)

    def _tell(self, event: str, data: JsonObject, key: str) -> None:
        with self._listening:
            listeners = [
                one for one in self._listeners if not (key and one.runs) or key in one.runs
            ]
        for listener in listeners:
            self._hand(listener, event, data)

    def _hand(self, listener: Listener, event: str, data: JsonObject) -> None:
        try:
            listener.loop.call_soon_threadsafe(_put, listener.queue, event, data)
        except RuntimeError:
            # Its event loop is closed, and so is its page.
            self.remove(listener)


def _put(queue: "asyncio.Queue[tuple[str, JsonObject]]", event: str, data: JsonObject) -> None:
    # A page that does not read loses events, and asks anew when it reads again.
    if not queue.full():
        queue.put_nowait((event, data))


def state_of(run: OneRun) -> State:
    """Return a state that changes when a part of a run, or of an eval without one, does."""
    if isinstance(run, OneEval):
        signs = [_signs(run.path, name) for name in run.changing]
        about = {"evals": signs, "state": run.brief()["state"], "step": 0}
        return {**about, "logs": _newest_files(run.path, "logs")}
    found: dict[str, object] = {part: _signs(run.path, name) for part, name in _FILES.items()}
    found["evals"] = (found["evals"], _signs(run.path, "evals"))
    for folder in _FOLDERS:
        found[folder] = _signs(run.path, folder)
    for folder in _GROWING:
        found[folder] = _newest_files(run.path, folder)
    try:
        found["state"] = run.info().observed_state.value
        found["step"] = run.course.last_step()
    except _OF_FILES:
        found["state"], found["step"] = "unreadable", 0
    return found


def _newest_files(root: Path, folder: str) -> object:
    files = listed(root, folder, suffixes=(".jsonl", ".log", ".parquet"))
    newest = sorted(files, key=lambda one: -one.stamp.mtime_ns)[:_NEWEST]
    return len(files), [(one.name, one.stamp) for one in newest]


def _signs(root: Path, name: str) -> object:
    path = inside(root, name)
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


async def events_for(watcher: Watcher, listener: Listener) -> AsyncIterator[bytes]:
    """Yield server-sent events until the page is closed, or the server ends."""
    try:
        while True:
            try:
                async with asyncio.timeout(_STILL_S):
                    event, data = await listener.queue.get()
            except TimeoutError:
                event, data = "still", _NOTHING
            if event == _END:
                return
            yield b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(data))
    finally:
        watcher.remove(listener)
