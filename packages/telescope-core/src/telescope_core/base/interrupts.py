"""Signals that ask a process to end: SIGTERM, SIGHUP and SIGINT (Ctrl-C).

The first of them says at once that the program stops, and ends in order what runs: on an event loop
that `interruptible.run` has started, the main task is cancelled; elsewhere `Interrupted` is raised
where the main thread is. Further ones change nothing, so that no cleanup is cut short. A signal
that was ignored before, as by `nohup` or by `&` in a script, stays ignored.

The state is global to the process, like signal handlers.
"""

import _thread
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_OF_WEAKREFS = ("weakref", "_weakrefset")
"""Modules whose functions run when an object ends."""
_PUT_OFF_S = 0.01
_MOST_PUT_OFF = 100
"""Times that a signal waits for a destructor to end, before it raises in one that takes long."""
Later = Callable[[Callable[[], object]], object]
"""A function that runs its argument on the event loop; it is called from the main thread."""


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end; the text says what is kept and how to continue."""

    def __init__(self, number: int, text: str = "") -> None:
        self.number = signal.Signals(number)
        super().__init__(text or f"interrupted by {self.number.name}")

    @property
    def exit_code(self) -> int:
        """Exit code that shells show for a program ended by this signal: 128 + its number."""
        return 128 + self.number


class _Signals:
    """The first signal that came, and the way to end the code that runs now."""

    def __init__(self) -> None:
        self.num_held = 0
        self.cancel: Callable[[], object] | None = None
        self.later: Later | None = None
        self.begin(is_taken=False)

    def begin(self, *, is_taken: bool) -> None:
        """Forget what came; `is_taken`: whether signals are handled from here on."""
        self.first: signal.Signals | None = None
        self.has_cut_short = False
        self.is_taken = is_taken
        self.is_put_off = False
        self.num_put_off = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_put_off:
            self.is_put_off = False
            self._end(frame, is_first=True)
            return
        is_first = self.first is None
        self.first = self.first or signal.Signals(number)
        name = signal.Signals(number).name
        if is_first:
            self._say(f"stopping ({name}) ...")
        else:
            self._say(f"still stopping ({name}); kill -KILL {os.getpid()} ends it at once")
        self._end(frame, is_first=is_first)

    def _end(self, frame: FrameType | None, *, is_first: bool) -> None:
        """End what runs now, unless it must not be cut short or is being ended."""
        assert self.first is not None, "a signal came"
        if self.num_held:
            return
        if self.cancel is None or self.later is None:
            if self.has_cut_short:  # what was ended is cleaning up
                return
            # Python prints and drops what is raised there.
            is_in_destructor = any(
                one.f_code.co_name == "__del__" or one.f_globals.get("__name__") in _OF_WEAKREFS
                for one, _ in traceback.walk_stack(frame)
            )
            if is_in_destructor and self.num_put_off < _MOST_PUT_OFF:
                self.is_put_off = True
                self.num_put_off += 1
                # No lock is taken for this thread, which the code that runs now might hold.
                _thread.start_new_thread(_wake, (self.first,))
                return
            self.has_cut_short = True
            raise Interrupted(self.first)
        if is_first:
            self.has_cut_short = True
            self.later(self.cancel)

    def _say(self, line: str) -> None:
        text = f"telescope: {line}\n"
        # A display that is redrawn in place shows what is written by way of sys.stderr. Where there
        # is none, the line must not wait for an event loop that somebody blocks.
        if self.later is not None and sys.stderr.isatty():
            self.later(lambda: _write(text))
        else:
            _write(text)


_signals = _Signals()


def _wake(number: int) -> None:
    """Send the main thread a signal a little later, also where it waits for something."""
    time.sleep(_PUT_OFF_S)
    main = threading.main_thread().ident
    if _signals.is_put_off and main is not None:
        signal.pthread_kill(main, number)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except RuntimeError:  # the signal came in the middle of another write
        os.write(2, text.encode())
    except (OSError, ValueError):  # nobody reads it any more, as after SIGHUP of a terminal
        return


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def kept() -> Generator[None]:
    """Restore these signal handlers after a block in which a library replaces them."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def taken(*, for_good: bool = False) -> Generator[None]:
    """Handle these signals while the block runs; outside the main thread, do nothing.

    `for_good`: the process ends after the block, and signals are ignored until then, because its
    work is done and its exit code is decided; libraries may need seconds to shut down.
    """
    if _signals.is_taken or not _is_main_thread():
        yield
        return
    _signals.begin(is_taken=True)
    with nullcontext() if for_good else kept():
        for number in NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _signals.on_signal)
        try:
            yield
        finally:
            if for_good:
                for number in NUMBERS:
                    signal.signal(number, signal.SIG_IGN)
            _signals.begin(is_taken=False)


def asked() -> signal.Signals | None:
    """Return the signal that asked this process to end; None if there was none."""
    return _signals.first


def cut_short() -> signal.Signals | None:
    """Return the signal for which something was ended early; None if nothing was."""
    return _signals.first if _signals.has_cut_short else None


def note(number: int) -> None:
    """Record signal `number`, which a library has handled in place of this module."""
    with held():
        _signals.on_signal(number, None)


def raise_if_asked() -> None:
    """Raise Interrupted if a signal has asked this process to end."""
    if _signals.first is not None:
        _signals.has_cut_short = True
        raise Interrupted(_signals.first)


def raise_in_thread_if_asked() -> None:
    """Raise Interrupted in a thread that works for the main one, where the signal itself raises."""
    if not _is_main_thread():
        raise_if_asked()


@contextmanager
def held() -> Generator[None]:
    """Keep signals from interrupting the block; afterwards, `asked` returns one that came."""
    _signals.num_held += 1
    try:
        yield
    finally:
        _signals.num_held -= 1


@contextmanager
def cancelling(cancel: Callable[[], object], later: Later) -> Generator[None]:
    """Make the first signal call `cancel` through `later` while the block runs."""
    before = _signals.cancel, _signals.later
    _signals.cancel, _signals.later = cancel, later
    try:
        yield
    finally:
        _signals.cancel, _signals.later = before
