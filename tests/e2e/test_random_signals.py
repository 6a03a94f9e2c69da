"""Signals end a real run at random moments: what it says, what it records, and what is left."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from random_signals import outcomes

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_a_run_ends_in_order_at_any_moment(tmp_path: Path, tiny_model: Path) -> None:
    found = outcomes(tmp_path, tiny_model, times=30, seed=1)
    assert [one for one in found if one.problems] == []
