"""The program of the harness `terminal`, run inside the sandbox: the model types into one shell.

It needs only Python: it has a shell on a pseudo-terminal, a screen that shows the output, and
requests to the endpoint. The shell marks when it waits for the next command (OSC 133).
"""

import codecs
import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

ROWS, COLUMNS = 40, 120
MAX_SHOWN = 12_000
"""Most characters of output that are shown to the model."""
QUIET_S = 0.2
"""Seconds without output after which a shell at its prompt counts as done."""
READ_BYTES = 65_536
HISTORY_LINES = 2_000
SEQUENCE = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b\](?P<text>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*(?P<single>[0-Z\\^-~])"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])"
    r"|(?P<written>[^\x00-\x1f\x7f]+)"
)
SHELL = {
    "PS1": "$ ",
    "PS0": r"\e]133;C\a",
    "PROMPT_COMMAND": r'printf "\033]133;D;%d\007" $?',
    "TERM": "xterm-256color",
    "LANG": "C.UTF-8",
    "PAGER": "cat",
    "HISTFILE": "/dev/null",
}


class Screen:
    """A terminal of ROWS x COLUMNS: the screen, and the lines that have scrolled off the top."""

    def __init__(self) -> None:
        self.above: list[str] = []
        """Lines that have scrolled off, oldest first."""
        self.is_waiting = False
        """Whether the shell waits for a command."""
        self.exit_code = 0
        self._dropped = 0
        self._rest = ""
        self._saved = (0, 0)
        self._main: tuple[list[list[str]], int, int] | None = None
        self._clear_all()
        self._shown_to = 0

    def feed(self, text: str) -> None:
        """Carry out the characters of `text`; an incomplete sequence waits for its end."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            found = SEQUENCE.match(text, at)
            if found is None:
                # An escape sequence whose end has not come; a very long one is no sequence.
                if len(text) - at < 4096:
                    self._rest = text[at:]
                    return
                at += 1
                continue
            at = found.end()
            if found["written"]:
                for one in found["written"]:
                    self._put(one)
            elif found["control"]:
                self._control(found["control"])
            elif found["final"]:
                self._sequence(found["parameters"], found["final"])
            elif found["text"] is not None:
                self._mark(found["text"])
            else:
                self._single(found["single"])

    def news(self) -> str:
        """Return what is new since the last call: lines, or the screen of a full-screen program.

        A full-screen program, such as an editor, is shown as its whole screen.
        """
        screen = ["".join(line).rstrip() for line in self._lines]
        here = self._dropped + len(self.above) + self._y
        if self._main is not None or here < self._shown_to:
            shown = screen
        else:
            lines = [*self.above, *screen]
            shown = lines[max(0, self._shown_to - self._dropped) :]
        if self._main is None:
            self._shown_to = here
        return "\n".join(shown).rstrip()

    def _clear_all(self) -> None:
        self._lines = [[" "] * COLUMNS for _ in range(ROWS)]
        self._x = self._y = 0
        self._top, self._bottom = 0, ROWS - 1

    def _put(self, one: str) -> None:
        if self._x == COLUMNS:
            self._x = 0
            self._down()
        self._lines[self._y][self._x] = one
        self._x += 1

    def _down(self) -> None:
        if self._y != self._bottom:
            self._y = min(self._y + 1, ROWS - 1)
            return
        gone = self._lines.pop(self._top)
        self._lines.insert(self._bottom, [" "] * COLUMNS)
        if self._main is None and self._top == 0:
            self.above.append("".join(gone).rstrip())
            if len(self.above) > HISTORY_LINES:
                self._dropped += len(self.above) - HISTORY_LINES
                del self.above[:-HISTORY_LINES]

    def _control(self, one: str) -> None:
        if one == "\r":
            self._x = 0
        elif one in "\n\v\f":
            self._down()
        elif one == "\b":
            self._x = max(0, min(self._x, COLUMNS - 1) - 1)
        elif one == "\t":
            self._x = min(COLUMNS - 1, self._x // 8 * 8 + 8)

    def _single(self, one: str) -> None:
        if one == "M":
            if self._y == self._top:
                self._shift(self._top, -1)
            else:
                self._y = max(0, self._y - 1)
        elif one == "7":
            self._saved = (self._x, self._y)
        elif one == "8":
            self._x, self._y = self._saved
        elif one == "c":
            self._clear_all()

    def _mark(self, text: str) -> None:
        """Handle a mark of the shell: D = a command has ended, C = one begins."""
        if text.startswith("133;D"):
            self.is_waiting = True
            code = text.rpartition(";")[2]
            self.exit_code = int(code) if code.isdigit() else 0
        elif text.startswith("133;C"):
            self.is_waiting = False

    def _sequence(self, parameters: str, final: str) -> None:
        if parameters.startswith("?"):
            if final in "hl" and {"47", "1047", "1049"} & set(parameters[1:].split(";")):
                self._use_other(final == "h")
            return
        numbers = [int(one) if one.isdigit() else 0 for one in parameters.split(";")]
        if final in "ABCDEFGHdf`":
            self._go(final, numbers)
        elif final in "JK":
            (self._erase_screen if final == "J" else self._erase_line)(numbers[0])
        elif final in "P@X":
            self._edit_line(final, max(1, numbers[0]))
        elif final in "LMST":
            count = max(1, numbers[0]) * (1 if final in "MS" else -1)
            self._shift(self._y if final in "LM" else self._top, count)
        elif final == "r":
            last = numbers[1] if len(numbers) > 1 and numbers[1] else ROWS
            self._top, self._bottom = max(1, min(numbers[0], last)) - 1, min(last, ROWS) - 1
            self._move(0, 0)
        elif final in "su":
            self._single("7" if final == "s" else "8")

    def _go(self, final: str, numbers: list[int]) -> None:
        x, y, first = min(self._x, COLUMNS - 1), self._y, max(1, numbers[0])
        if final in "Hf":
            self._move((max(1, numbers[1]) if len(numbers) > 1 else 1) - 1, first - 1)
        elif final in "CD":
            self._move(x + (first if final == "C" else -first), y)
        elif final in "G`d":
            self._move(*((x, first - 1) if final == "d" else (first - 1, y)))
        else:
            self._move(0 if final in "EF" else x, y + (first if final in "BE" else -first))

    def _edit_line(self, final: str, count: int) -> None:
        """Insert (@), delete (P) or erase (X) characters at the cursor."""
        line, x = self._lines[self._y], min(self._x, COLUMNS - 1)
        blank = [" "] * min(count, COLUMNS - x)
        if final == "@":
            line[x:] = (blank + line[x:])[: COLUMNS - x]
        elif final == "P":
            line[x:] = line[x + len(blank) :] + blank
        else:
            line[x : x + len(blank)] = blank

    def _erase_line(self, what: int) -> None:
        x = min(self._x, COLUMNS - 1)
        begin, end = {0: (x, COLUMNS), 1: (0, x + 1)}.get(what, (0, COLUMNS))
        self._lines[self._y][begin:end] = [" "] * (end - begin)

    def _move(self, x: int, y: int) -> None:
        self._x, self._y = max(0, min(x, COLUMNS - 1)), max(0, min(y, ROWS - 1))

    def _erase_screen(self, what: int) -> None:
        for y in range(ROWS):
            if what >= 2 or (what == 0 and y > self._y) or (what == 1 and y < self._y):
                self._lines[y] = [" "] * COLUMNS
        if what < 2:
            self._erase_line(what)

    def _shift(self, top: int, count: int) -> None:
        """Move the lines from `top` to the end of the region up by `count`, or down."""
        size = self._bottom + 1 - top
        blank = [[" "] * COLUMNS for _ in range(min(abs(count), size))]
        lines = self._lines[top : top + size]
        moved = [*lines[count:], *blank] if count > 0 else [*blank, *lines[:count]]
        self._lines[top : top + size] = moved[:size] if count < 0 else moved[-size:]

    def _use_other(self, is_on: bool) -> None:
        if is_on and self._main is None:
            self._main = (self._lines, self._x, self._y)
            self._clear_all()
        elif not is_on and self._main is not None:
            self._lines, self._x, self._y = self._main
            self._main = None
            self._top, self._bottom = 0, ROWS - 1


class Terminal:
    """A shell with its screen, which keeps its state from turn to turn."""

    def __init__(self) -> None:
        self.screen = Screen()
        self.is_open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pid, self._line = pty.fork()
        if pid == 0:
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-i"], {**os.environ, **SHELL})
        fcntl.ioctl(self._line, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.wait(10.0)

    def type(self, keys: str, wait_s: float) -> None:
        """Type `keys`, and wait until the shell is done with them, at most `wait_s`."""
        if "\n" in keys or "\r" in keys:
            self.screen.is_waiting = False
        data = keys.encode(errors="replace")
        until = time.monotonic() + max(wait_s, 1.0)
        while data and self.is_open and time.monotonic() < until:
            # A program that reads nothing must not stop this one for ever.
            if select.select([], [self._line], [], 0.05)[1]:
                data = data[os.write(self._line, data[:1024]) :]
            self._read(0.0)
        self.wait(wait_s)

    def wait(self, wait_s: float) -> None:
        """Read until the shell waits for a command and is quiet, or `wait_s` are over."""
        until = time.monotonic() + wait_s
        while self.is_open and (left_s := until - time.monotonic()) > 0:
            has_read = self._read(min(left_s, QUIET_S))
            if not has_read and self.screen.is_waiting:
                return

    def state(self) -> str:
        """Return a sentence about the shell's state."""
        if not self.is_open:
            return "the shell has ended"
        if self.screen.is_waiting:
            return f"the shell waits for a command; the last one ended with {self.screen.exit_code}"
        return "a program is running"

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._line], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._line, READ_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        self.screen.feed(self._decoder.decode(data))
        return True


def asked_in(answer: str) -> dict[str, Any]:
    """Return the last JSON object in `answer` that has commands or ends the task.

    Raises ValueError with a text for the model if there is none.
    """
    decoder, at = json.JSONDecoder(strict=False), 0
    found: dict[str, Any] | None = None
    while (at := answer.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if isinstance(value, dict) and ("commands" in value or "done" in value):
            found = cast(dict[str, Any], value)
    if found is None:
        raise ValueError("there is no JSON object with commands in the answer")
    commands: object = found.get("commands", [])
    for one in cast(list[object], commands) if isinstance(commands, list) else [None]:
        keys = cast(dict[str, Any], one) if isinstance(one, dict) else {}
        if not isinstance(keys.get("keys"), str) or not isinstance(
            keys.get("wait_s", 0), int | float
        ):
            raise ValueError(
                'commands must be a list of objects such as {"keys": "ls\\n", "wait_s": 5}'
            )
    return found


def shortened(text: str) -> str:
    """Return `text`, without its middle where it is too long."""
    half = MAX_SHOWN // 2
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:half]}\n[{len(text) - MAX_SHOWN} characters left out]\n{text[-half:]}"


def said_by_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's answer; a failed inference server is asked twice more."""
    base_url, model = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_MODEL"]
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    for is_last in (False, False, True):
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code < 500 or is_last:
                raise SystemExit(f"{error.code}: {error.read().decode(errors='replace')}") from None
    raise AssertionError("the last attempt returns or raises")


def main(path: str) -> None:
    """Carry out the task in the file at `path`, and write the answer to the file named there."""
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    terminal = Terminal()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": asked["instructions"]},
        {"role": "user", "content": f"{asked['task']}\n\n{terminal.screen.news()}"},
    ]
    for _ in range(asked["max_turns"]):
        said = said_by_model(messages)
        kept = {"role": "assistant", "content": said.get("content") or ""}
        if said.get("reasoning_content"):
            kept["reasoning_content"] = said["reasoning_content"]
        messages.append(kept)
        try:
            wanted = asked_in(kept["content"])
        except ValueError as error:
            messages.append({"role": "user", "content": f"{error}. Answer with one such object."})
            continue
        for one in wanted.get("commands", []):
            wait_s = min(max(one.get("wait_s", asked["wait_s"]), 0.0), asked["max_wait_s"])
            terminal.type(one["keys"], wait_s)
        if wanted.get("done") is True:
            Path(asked["answer_file"]).write_text(str(wanted.get("answer", "")), encoding="utf-8")
            return
        shown = shortened(terminal.screen.news())
        messages.append({"role": "user", "content": f"{shown}\n[{terminal.state()}]"})
        if not terminal.is_open:
            terminal = Terminal()
    sys.exit(asked["max_turns_exit_code"])


if __name__ == "__main__":
    main(sys.argv[1])
