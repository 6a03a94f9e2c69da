"""A run proves that it was not trained on what its evals hold out."""

import pytest

from telescope_core import TelescopeError
from telescope_train.summary import require_disjoint


def test_an_eval_example_that_was_trained_on_is_told():
    summary = {"run_folder": "runs/a", "examples": {"trained": 9, "held_out": 4, "in_both": 0}}
    require_disjoint(summary)
    summary["examples"]["in_both"] = 2
    with pytest.raises(TelescopeError, match="2 examples of evals were trained on"):
        require_disjoint(summary)
