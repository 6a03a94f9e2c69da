"""A run says what its metrics show, once it is worth a word."""

import pytest

from telescope_train.diagnostics.step_rules import diagnoses


@pytest.mark.parametrize("row", [{}, {"turns/branched": 0.01}])
def test_nothing_is_said_of_a_healthy_step(row):
    assert diagnoses(row) == {}


def test_branched_turns_are_explained_with_what_to_do():
    found = diagnoses({"turns/branched": 0.25})
    assert "25% of later turns" in found["turns/branched"]
    assert "chat_template" in found["turns/branched"]
