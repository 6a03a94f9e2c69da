"""`DeathCause`: find the first error of a server that dies, in its output.

The death of an engine is printed many times over: by the engine, by each request that waited for
it, and by the server as it ends. Only the first traceback is the cause; of a chain of exceptions,
Python prints the innermost one first.
"""

import re

MAX_CHARACTERS = 400
_MORE_LINES = 3
"""Indented lines after that of an exception that belong to its message."""
_WHO = re.compile(r"^\([\w .:/-]+ pid=\d+\) ")
_LOGGED = re.compile(r"^(?:[A-Z]+ )?\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_ENGINE_FAILS = re.compile(
    r"the engine failed|(?:EngineCore|WorkerProc)\S* (?:failed|hit|encountered)", re.IGNORECASE
)
"""Texts of the engine before the traceback of a fatal error."""
_FOLLOWS = re.compile(
    r"EngineDeadError|EngineCore failed to start|Engine core initialization failed|"
    r"WorkerProc initialization failed|cancelled|KeyboardInterrupt|SystemExit"
)
"""An exception that only says that an earlier one was the cause."""


class DeathCause:
    """Searches the lines of a server's output, which are passed to it in order."""

    def __init__(self) -> None:
        self._engine = ""
        """The first exception after the engine reported a failure."""
        self._last = ""
        """The innermost exception of the newest traceback."""
        self._num_more = 0
        self._process = ""
        """The process of that traceback."""
        self._is_in_traceback = False
        self._is_of_engine = False
        self._is_chained = False

    def hear(self, line: str) -> None:
        """Read one line."""
        who = _WHO.match(line)
        process = who[0] if who else ""
        if self._is_in_traceback and process != self._process:
            return  # a line of another process in the middle of it
        text = _LOGGED.sub("", line.removeprefix(process)).rstrip()
        if text == _TRACEBACK:
            self._is_in_traceback, self._num_more, self._process = True, 0, process
        elif text.startswith(_CHAINED):
            self._is_chained, self._num_more = True, 0
        elif self._is_in_traceback:
            if text and not text[0].isspace():
                self._end_traceback(text)
        elif self._num_more and text.startswith(" "):
            self._num_more -= 1
            self._take(f"{self._last} {text.strip()}")
        elif text:
            self._num_more, self._is_chained = 0, False
            self._is_of_engine = bool(_ENGINE_FAILS.search(text)) and not self._engine

    def found(self, *, has_ended_itself: bool) -> str:
        """Return the exception and its message; empty if the output does not tell.

        `has_ended_itself`: the server was not ended by a signal, so that its last traceback is
        about its end even if the engine has said nothing.
        """
        return self._engine or (self._last if has_ended_itself else "")

    def _end_traceback(self, text: str) -> None:
        # A later one of a chain is only what became of the first one.
        is_cause = not self._is_chained and _EXCEPTION.match(text) and not _FOLLOWS.search(text)
        self._is_in_traceback = self._is_chained = False
        if is_cause:
            self._num_more = _MORE_LINES
            self._take(text)

    def _take(self, exception: str) -> None:
        self._last = exception[:MAX_CHARACTERS]
        if self._is_of_engine:
            self._engine = self._last


def is_same_cause(one: str, other: str) -> bool:
    """Return whether two deaths have the same cause, ignoring numbers such as addresses."""
    return bool(one) and _without_numbers(one) == _without_numbers(other)


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?", "#", text)
