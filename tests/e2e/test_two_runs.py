"""Two runs that begin together on one machine, with the same default port, do not meet."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from two_runs import run_pair

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.mark.parametrize("pair", range(3))
def test_no_token_and_no_update_is_of_the_other_run(tmp_path: Path, pair: int) -> None:
    run_pair(tmp_path / str(pair))
