"""What holds for every test."""

import gc

import pytest


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
