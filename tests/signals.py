"""Signals for programs that tests start."""

import signal


def heed_all_but(ignored: int | None = None) -> None:
    """Undo what `nohup`, or `&` in a script, has set for whoever runs the tests."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)
