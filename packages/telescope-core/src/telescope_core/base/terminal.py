"""Characters that terminals act on, shown as text instead.

Names, summaries and messages come from other people. Control characters in them could change text
on the screen, and bidirectional controls could change its visible order.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

ACTS_ON_TERMINALS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Control characters, line separators and bidirectional controls, as in a regular expression."""
WIDTH = 80
"""Columns of a report, where it is not shown on a terminal with fewer."""
_NARROWEST = 20
_NAME_WIDTH = 24
_END_LINES = 12
"""Lines of a long text that are shown from its beginning, and as many from its end."""
_ACTING = re.compile(f"[{ACTS_ON_TERMINALS}]")
_ACTING_IN_LINES = re.compile(rf"(?![\t\n])[{ACTS_ON_TERMINALS}]")


def report_width() -> int:
    """Return the columns of a report on stdout: 80, or those of a narrower terminal."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return min(max(columns, _NARROWEST), WIDTH)


def row(name: str, detail: str) -> str:
    """Return a name and what is said of it, beside it."""
    lines = textwrap.wrap(detail, WIDTH - _NAME_WIDTH, break_on_hyphens=False) or [""]
    name = name if len(name) <= 20 else f"{name[:17]}..."
    return f"\n{' ' * _NAME_WIDTH}".join([f"  {name:<22}{lines[0]}", *lines[1:]])


def wrapped(text: str, mark: str) -> list[str]:
    """Return the lines of `text` after `mark`; its own line breaks stay, indented."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        inner = " " * (len(mark) + 2 * bool(number))
        begin = inner if number else mark
        lines += textwrap.wrap(
            line.strip(),
            WIDTH,
            initial_indent=begin,
            subsequent_indent=inner,
            break_on_hyphens=False,
        )
    return lines


def quoted(text: str, mark: str) -> Iterator[str]:
    """Yield the lines of `text` as it is, each after `mark`; of a long text the two ends."""
    lines = [
        line
        for paragraph in text.removesuffix("\n").split("\n")
        for line in textwrap.wrap(paragraph, WIDTH - len(mark), drop_whitespace=False) or [""]
    ]
    left_out = len(lines) - 2 * _END_LINES
    if left_out > 1:
        lines[_END_LINES:-_END_LINES] = [f"... ({left_out:,} more lines)"]
    yield from (f"{mark}{line}" for line in lines)


class _Screen(Protocol):
    """What a console of rich knows of its terminal."""

    @property
    def is_terminal(self) -> bool: ...
    @property
    def is_dumb_terminal(self) -> bool: ...


def redraws(console: _Screen) -> bool:
    """Return whether `console` can change what it has shown: bars and panels are lines elsewhere.

    `TERM=dumb`, as in the shells of editors, is a terminal that only adds text.
    """
    return console.is_terminal and not console.is_dumb_terminal


def acts_on_terminals(text: str) -> bool:
    """Return whether `text` has a character that a terminal acts on, newlines and tabs included."""
    return _ACTING.search(text) is not None


def escaped(text: str) -> str:
    r"""Return `text` with such characters written as `\u001b`; newlines and tabs stay.

    The same escape is valid in JSON, so JSON that is escaped after it was written keeps its value.
    """
    return _ACTING_IN_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def whole(text: str) -> str:
    r"""Return `text` with half of a surrogate pair, which UTF-8 lacks, written as `\ud83d`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def whole_strings(value: Any) -> object:
    """Return plain data in which `whole` was applied to every string; tuples become lists."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list | tuple):
        return [whole_strings(one) for one in cast(Sequence[object], value)]
    if isinstance(value, dict):
        items = cast(dict[object, object], value).items()
        return {whole_strings(name): whole_strings(one) for name, one in items}
    return value


def foreign(text: str, most: int) -> str:
    """Return foreign text for a terminal, a page or a log: escaped, and cut in the middle if long.

    If the text is longer than `most` characters, three quarters of `most` are kept of its beginning
    and a quarter of its end.
    """
    if len(text) > most:
        head, tail = most - most // 4, most // 4
        text = f"{text[:head]} ... ({len(text) - most} characters left out) ... {text[-tail:]}"
    return escaped(text)
