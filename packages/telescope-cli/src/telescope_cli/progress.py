"""Progress of a command that may take minutes: a bar on a terminal, elsewhere occasional lines.

Work that takes less than two seconds shows nothing.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner

from telescope_core.base.terminal import redraws

_SHOWN_AFTER_S = 2.0
_LINE_EVERY_S = 10.0

OnProgress = Callable[[int, int], None]
"""Called with the amount of work done, and the total."""


@contextmanager
def progress_of(
    what: str,
    *,
    unit: str = "steps",
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[OnProgress]:
    """Yield a function to call with each progress message, which is shown on stderr."""
    console = console or Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}} of {{task.total}} {unit}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(what, total=None)
    began_s = clock()
    next_line_s = began_s + _SHOWN_AFTER_S

    def on_progress(done: int, of: int) -> None:
        nonlocal next_line_s
        now_s = clock()
        if now_s < began_s + _SHOWN_AFTER_S:
            return
        if redraws(console):
            bar.start()
            bar.update(task, completed=done, total=of)
        elif now_s >= next_line_s:
            console.print(f"{what}: {done} of {of} {unit} after {now_s - began_s:.0f} s")
            next_line_s = now_s + _LINE_EVERY_S

    try:
        yield on_progress
    finally:
        # One that was never started would leave an empty line.
        if bar.live.is_started:
            bar.stop()


@contextmanager
def waiting(what: str, *, console: Console | None = None) -> Generator[None]:
    """Show `what` on a terminal, from two seconds on, while the block runs.

    For work of some seconds that cannot tell how far it is. Elsewhere nothing is shown.
    """
    console = console or Console(stderr=True, highlight=False)
    if not redraws(console):
        yield
        return
    # What the block prints on stderr comes above it; stdout may be a file.
    shown = Live(Spinner("dots", what), console=console, transient=True, redirect_stdout=False)
    later = threading.Timer(_SHOWN_AFTER_S, shown.start)
    later.daemon = True
    later.start()
    try:
        yield
    finally:
        later.cancel()
        later.join()
        shown.stop()
