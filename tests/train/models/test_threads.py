"""How many threads a rank gets: its part of all cores for a large model, one for a small one."""

from dataclasses import replace

import pytest

from telescope_train.models import device
from telescope_train.models.device import WORTH_ALL_CORES, threads_of
from telescope_train.models.facts import UNKNOWN_FACTS

SMALL = replace(UNKNOWN_FACTS, num_parameters=WORTH_ALL_CORES - 1)
LARGE = replace(UNKNOWN_FACTS, num_parameters=WORTH_ALL_CORES)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 8)


def test_a_large_model_has_all_cores_divided_among_its_ranks():
    assert [threads_of(LARGE, num_ranks=n, is_alone=True) for n in (1, 2, 3, 9)] == [8, 4, 2, 1]


def test_a_model_of_unknown_size_is_taken_for_a_large_one():
    assert threads_of(UNKNOWN_FACTS, num_ranks=1, is_alone=True) == 8


def test_a_small_model_and_a_cluster_of_others_give_one_thread():
    assert threads_of(SMALL, num_ranks=1, is_alone=True) == 1
    assert threads_of(LARGE, num_ranks=1, is_alone=False) == 1
