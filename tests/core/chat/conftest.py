"""Lets the tests of this folder import the endpoint that they share, and pauses pass quickly."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope_core.chat import http

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Let a request that failed be tried again after a few milliseconds."""
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.005)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the budgets of retries: it stands still until a test moves `now_s`."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock
