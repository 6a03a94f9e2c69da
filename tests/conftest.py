"""What holds for every test."""

import gc
import re
from collections import Counter
from pathlib import Path

import pytest

LONGEST_FIRST = (
    "tests/e2e/test_faults.py",
    "tests/envs/test_circle.py",
    "tests/e2e/test_resumed_run.py",
    "tests/e2e/test_three_nodes.py",
    "tests/e2e/test_first_run.py",
    "tests/e2e/test_random_kills.py",
    "tests/e2e/test_parallel_servers.py",
    "tests/e2e/test_two_ranks.py",
    "tests/train/models/test_compile.py",
)
"""Files that take a minute and more, the longest first.

A file of engine tests stays with one worker of xdist. Were one of these the last, the other
workers would wait for it with nothing to do.
"""
_ALL_ENGINE = re.compile(rb"^pytestmark = (\[.*)?pytest\.mark\.engine\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Show failures when they happen, in the process that prints (so in no worker of xdist)."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config), "failures-at-once")


class _FailuresAtOnce:
    """Prints each failure as it happens: a run that is ended from outside has told them by then."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print what failed, under the line of its letter."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)
            reporter.write_line(report.longreprtext)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that have no test of the kind asked for: each process imports all others."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    kind = config.option.markexpr
    if kind.startswith("engine") and b"engine" not in collection_path.read_bytes():
        return True
    if kind.startswith("not engine") and _ALL_ENGINE.search(collection_path.read_bytes()):
        return True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin engine tests with the files that take longest, then those with the most tests."""
    if not config.option.markexpr.startswith("engine"):
        return
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    num_tests = Counter(item.nodeid.partition("::")[0] for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        file = item.nodeid.partition("::")[0]
        return places.get(file, len(places)), -num_tests[file]

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage to come.

    Torch and transformers alone are half a million objects that stay to the end, and looking
    through them takes longer than many a test.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter clean up at its end as always; native modules complain if it cannot."""
    gc.unfreeze()
