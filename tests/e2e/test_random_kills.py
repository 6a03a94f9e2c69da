"""Processes of a real run are killed at random moments: nothing is skipped or trained on twice."""

import sys
from pathlib import Path

import pytest
from tests.ports import free_port

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_faults import kill_many, untouched
from faults.victim import Place

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# Before the first kill, and for each of them: steps until it and one more.
MOST_STEPS = 60


@pytest.fixture(scope="module")
def examples(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The examples of each step, when nothing dies."""
    folder = tmp_path_factory.mktemp("untouched")
    place = Place(
        folder=folder, model=tiny_model, port=free_port(), num_ranks=2, num_steps=MOST_STEPS
    )
    return untouched(place)


def test_a_run_goes_on_exactly_whatever_is_killed(
    tmp_path: Path, tiny_model: Path, examples: list[list[str]]
) -> None:
    # One of each, because a start of the driver takes half a minute; the benchmark kills many.
    place = Place(folder=tmp_path, model=tiny_model, port=free_port(), num_ranks=2)
    kills, found = kill_many(place, ["driver", "rank", "environment"], times=1, seed=1)
    assert [(one.lost, one.is_told) for one in kills] == [("", True)] * 3
    assert [one.repeated for one in kills if one.kind == "environment"] == [0]
    assert all(one.repeated <= 9 for one in kills)
    shared = min(len(found), len(examples))
    assert shared > 10
    assert found[:shared] == examples[:shared]
