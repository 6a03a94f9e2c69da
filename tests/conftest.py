"""What holds for every test."""

import gc

import pytest


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
