"""Drives a real Chromium without a screen, over the two pipes of its DevTools protocol."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VARIABLE = "TELESCOPE_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LIMIT_S = 120.0


def find_chromium() -> str:
    """Return the browser that TELESCOPE_CHROMIUM names, else the first one in PATH."""
    found = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, (
        f"the pages are tested in a real browser: install chromium, or set {VARIABLE} to the path "
        "of a Chromium or Chrome; the tests of a parser are in test_pages.py"
    )
    return found


class Browser:
    """One page of a running Chromium."""

    def __init__(
        self, to_browser: int, from_browser: int, *, beside: "Browser | None" = None
    ) -> None:
        """`beside`: another page of the same Chromium; both cannot wait at the same time."""
        self._to, self._from = to_browser, from_browser
        self._rest = bytearray() if beside is None else beside._rest
        self._numbers = itertools.count(1) if beside is None else beside._numbers
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        """What the browser logged: blocked scripts and styles, missing files, errors."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict[str, Any]:
        """Return the result of one command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda found: found.get("id") == number, method)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def another(self) -> "Browser":
        """Open another page of the same Chromium, as in another tab."""
        return Browser(self._to, self._from, beside=self)

    def open(self, url: str) -> None:
        """Go to `url` and wait until all of it is loaded."""
        self.call("Page.navigate", url=url)
        self._wait_for_load()

    def reload(self) -> None:
        """Load the page once more, and wait until all of it is there.

        A script that reloads its own page returns while the page is still the old one, so
        that what is asked next fails when the new one takes its place.
        """
        self.call("Page.reload")
        self._wait_for_load()

    def _wait_for_load(self) -> None:
        self._wait(lambda found: found.get("method") == "Page.loadEventFired", "loading")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, or of its promise."""
        parameters = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", **parameters)
        assert "exceptionDetails" not in result, (expression, result)
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression in the page is true; what it is not is told."""
        limit_ms = int(_LIMIT_S * 900)
        program = (
            f"new Promise((done, fail) => {{ const end = Date.now() + {limit_ms};"
            f" const look = () => {{ if ({expression}) done(true);"
            " else if (Date.now() > end) fail(new Error(document.body.innerText.slice(0, 2000)));"
            " else setTimeout(look, 20); }; look(); })"
        )
        result = self.call("Runtime.evaluate", expression=program, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])

    def key(self, key: str) -> None:
        """Press and release a key that writes one letter or none."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, height: int | None = None) -> bytes:
        """Return the page, or the top of it, as PNG."""
        size = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": height or size[1], "scale": 1}
        shown = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self.call("Page.captureScreenshot", **shown)["data"])

    def text(self) -> str:
        """Return the text as a person sees it."""
        return self.evaluate("document.body.innerText")

    def resize(self, width: int, height: int = 800) -> None:
        """Give the window another size, CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Ask for the `light` or `dark` colors."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def type(self, text: str) -> None:
        """Type into what has the focus, then press Enter."""
        self.call("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **enter)

    def click(self, selector: str, times: int = 1) -> None:
        """Press the mouse in the middle of an element, or of its first line; twice as two do."""
        x, y, width, height = self.place(selector)
        at = {"x": x + width / 2, "y": y + height / 2, "button": "left"}
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, clickCount=count, **at)

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll to an element; return x, y, width and height of it, or of its first line.

        A page that comes to where it was left, or gets its data, moves what is in it. So the
        element must be where it was two frames ago, and be what the mouse meets in its middle.
        """
        return tuple(self.evaluate(_place_of(selector)))

    def _wait(self, fits, what: str) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" in self._rest:
                end_of_text = self._rest.index(b"\0")
                found = json.loads(self._rest[:end_of_text])
                del self._rest[: end_of_text + 1]
                self._note(found)
                if fits(found):
                    return found
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"chromium did not answer {what} in {_LIMIT_S:g} s"
            data = os.read(self._from, 1 << 20)
            assert data, f"chromium ended during {what}"
            self._rest += data

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(about))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {about['message']}")


def _place_of(selector: str) -> str:
    """Return a script whose promise is [x, y, width, height] of an element that stays there."""
    return f"""(async () => {{
      const end = Date.now() + {int(_LIMIT_S * 900)};
      const frame = () => new Promise(requestAnimationFrame);
      let met = "no such element";
      while (Date.now() < end) {{
        const wanted = document.querySelector({json.dumps(selector)});
        wanted?.scrollIntoView();
        const before = wanted?.getClientRects()[0];
        await frame();
        await frame();
        const now = wanted?.getClientRects()[0];
        if (!before || !now) continue;
        const place = [now.x, now.y, now.width, now.height];
        const there = document.elementFromPoint(now.x + now.width / 2, now.y + now.height / 2);
        met = there?.outerHTML.slice(0, 300) ?? "nothing, outside of the window";
        const isStill = `${{place}}` === `${{[before.x, before.y, before.width, before.height]}}`;
        if (isStill && wanted.contains(there)) return place;
      }}
      throw new Error("the mouse would meet " + met);
    }})()"""


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a fresh profile; it is gone afterwards, with all of its processes."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
        *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
    ]
    # Chromium takes its commands from file 3 and answers to file 4.
    program = (
        f"import os, sys; os.dup2({read_commands}, 100); os.dup2({write_answers}, 101); "
        "os.dup2(100, 3); os.dup2(101, 4); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, find_chromium(), *flags],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        os.close(write_commands)
        os.close(read_answers)
