"""The calibration of diagnosis: what counts as named, and whether its runs are the product's."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_diagnosis import accused, make_models, play, read_outcomes, steps_until_named
from diagnosis.cases import FAULTS, HEALTHY, STOPS
from diagnosis.one_run import Case, Outcome, config_of

from telescope_core.diagnosis import RULES
from telescope_core.errors import ConfigError
from telescope_train.plan.checks.config import check_config

# The benchmark imports what trains.
pytestmark = pytest.mark.slow

REFUSED = {"clip range of 0"}
"""Faults that the settings do not allow, so that no run begins."""
FAULT = Case(name="a", what="", expects=("collapse", "no signal"), plant=lambda running: None)


def outcome(*findings: tuple[str, int], stopped="", steps=26) -> Outcome:
    said = tuple((rule, step, "") for rule, step in findings)
    return Outcome(case="a", findings=said, stopped=stopped, steps=steps, seconds=1.0)


def test_only_its_own_rules_name_a_fault_and_only_after_it_was_planted():
    assert steps_until_named(FAULT, outcome(("no signal", 12), ("collapse", 11))) == 5
    assert steps_until_named(FAULT, outcome(("entropy gone", 12))) is None
    assert steps_until_named(FAULT, outcome(("collapse", 6))) is None
    assert steps_until_named(FAULT, outcome(("collapse", 27))) is None
    stops = replace(FAULT, expects=(STOPS,))
    assert steps_until_named(stops, outcome(stopped="no step", steps=9)) == 3


def test_what_is_said_before_the_fault_or_of_a_healthy_run_is_a_false_alarm():
    found = outcome(("entropy gone", 5), ("collapse", 9))
    assert accused(FAULT, found) == ["entropy gone"]
    assert accused(replace(FAULT, expects=()), found) == ["entropy gone", "collapse"]


def test_every_fault_is_one_that_is_played_or_refused_and_has_rules_that_exist(tmp_path):
    known = {rule.name for rule in RULES} | {STOPS}
    names = [case.name for case in (*FAULTS, *HEALTHY)]
    assert len(names) == len(set(names))
    for case in (*FAULTS, *HEALTHY):
        if case.name in REFUSED:
            with pytest.raises(ConfigError):
                check_config(config_of(case, tmp_path))
        else:
            check_config(config_of(case, tmp_path))
        assert set(case.expects) <= known, case.name
    assert all(case.expects for case in FAULTS)
    assert {case.name for case in FAULTS if STOPS in case.expects} >= REFUSED
    assert not any(case.expects for case in HEALTHY)


@pytest.mark.engine
@pytest.mark.nightly
def test_faults_are_named_in_real_runs_and_a_healthy_one_is_not_accused(tmp_path):
    names = ("advantages of the wrong sign", "dropped optimizer steps", "lottery", "sums, seed 0")
    cases = [case for case in (*FAULTS, *HEALTHY) if case.name in names]
    play(cases, make_models(tmp_path, seed=0), tmp_path / "rows.jsonl", seed=0, port=0)
    found = read_outcomes(tmp_path / "rows.jsonl")
    for case in cases:
        assert accused(case, found[case.name]) == []
        if case.expects:
            assert steps_until_named(case, found[case.name]) is not None, case.name
