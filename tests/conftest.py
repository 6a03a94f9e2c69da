"""What holds for every test: one Hypothesis profile, and failures and times as they come."""

import ast
import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

_WHOLE_FILE = re.compile(rb"^pytestmark = .*$", re.MULTILINE)
_KINDS = ("slow", "engine", "nightly", "gpu")
_TOLD_FROM_S = 10.0
"""A test that takes as long is told when it ends: few of them fill a line of dots."""


def pytest_configure(config: pytest.Config) -> None:
    """Load the Hypothesis profile, and show failures when they happen.

    How long an example takes says what else the machine does, so no profile has a deadline. CI
    derives its examples from the tests, so that a change which touches nothing fails nothing; all
    other runs look for new ones and print the line that repeats a failure.
    """
    clockless = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    hypothesis.settings.register_profile(
        "telescope", deadline=None, suppress_health_check=clockless, print_blob=True
    )
    hypothesis.settings.register_profile(
        "ci", hypothesis.settings.get_profile("telescope"), derandomize=True
    )
    hypothesis.settings.load_profile("ci" if "CI" in os.environ else "telescope")
    config.pluginmanager.register(_AsItHappens(config), "as-it-happens")
    if sys.version_info < (3, 11, 8):
        ast.parse = _parse_without_collections


_parse = ast.parse


def _parse_without_collections(*given: Any, **named: Any) -> Any:
    """Parse, and collect no garbage meanwhile.

    Python before 3.11.8 counts the depth of all trees that it makes in one place (CPython issue
    106905). If garbage that is collected while it makes one, or another thread, has it make a
    second, it raises SystemError, in whatever test that happens: pydantic parses the source of
    classes, and so do tracebacks that are written.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return _parse(*given, **named)
    finally:
        if is_collecting:
            gc.enable()


class _AsItHappens:
    """Prints each failure as it happens, and writes how long each test took.

    A run that is ended from outside has told its failures by then. `scripts/run_tests.py` reads the
    times, a JSON line a test, from the file that TELESCOPE_TEST_TIMES names.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._times = os.environ.get("TELESCOPE_TEST_TIMES")
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print what failed, under the line of its letter; add up set-up, call and tear-down."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)
            reporter.write_line(report.longreprtext)
        if self._times is None:
            return
        seconds = self._seconds.pop(report.nodeid, 0.0) + report.duration
        if report.when != "teardown":
            self._seconds[report.nodeid] = seconds
            return
        if seconds >= _TOLD_FROM_S and reporter is not None:
            reporter.write_line(f" {seconds:.0f} s {report.nodeid}")
        with open(self._times, "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": report.nodeid, "seconds": round(seconds, 3)}) + "\n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without a test of the kind that `-m` asks for: importing them takes long."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    asked = config.option.markexpr
    text = collection_path.read_bytes()
    kind = asked.partition(" ")[0]
    # In capitals too: a mark may have a name, such as SLOW, in the file that defines it.
    if kind in _KINDS and kind.encode() not in text.lower():
        return True
    whole = b" ".join(_WHOLE_FILE.findall(text)).decode()
    if any(f"not {kind}" in asked and f"mark.{kind}" in whole for kind in _KINDS):
        return True
    return None


@pytest.fixture(scope="module", autouse=True)
def torch_draws_the_same_in_each_file() -> None:
    """Begin torch's own random numbers again: what a test draws depends on no file before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage to come.

    Torch and transformers alone are half a million objects that stay to the end, and looking
    through them takes longer than many a test.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do the same for what the tests of a file imported, since some tests collect many times."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter clean up at its end as always; native modules complain if it cannot."""
    gc.unfreeze()
