"""The grader of mathematics keeps the figures of `benchmarks/bench_grading.py`."""

import importlib
from pathlib import Path

import pytest

from telescope_core.graders.mathematics import MathGrader

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_pairs_labelled_by_construction_are_judged_as_labelled(monkeypatch, seed):
    """At most 0.5 % wrongly equal and 2 % wrongly different, of 120 pairs: none, and two."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_grading")
    chosen = list(bench.pairs(120, seed))
    assert len({pair.category for pair in chosen}) == 8
    assert sum(pair.is_equal for pair in chosen) in range(56, 65)
    grader = MathGrader()
    said, _ = bench.measure(grader.are_equal, chosen)
    grader.close()
    wrong = [pair for one, pair in zip(said, chosen, strict=True) if one != pair.is_equal]
    assert [pair for pair in wrong if not pair.is_equal] == []
    assert len(wrong) <= 2, wrong
