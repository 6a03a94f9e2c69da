"""Loss and gradient of every algorithm with every modifier, against plain Python."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
import slow
from cases import ALGORITHMS, LIMIT, forms_of, run, section_of, steps

from telescope_train.algorithms import known_algorithms


def assert_close(found: torch.Tensor, expected: list[float], relative: float) -> None:
    expected_T = torch.tensor(expected, dtype=torch.float64)
    assert (found.double() - expected_T).norm() <= relative * expected_T.norm() + 1e-15


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=3)
@given(rollouts=steps())
def test_loss_and_gradient_equal_the_slow_version(algorithm, rollouts):
    for form, given_settings in forms_of(algorithm).items():
        expected = slow.total(algorithm, given_settings, rollouts, LIMIT)
        loss, by_logprob, by_entropy, _ = run(rollouts, section_of(algorithm, form))
        assert loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-9), form
        assert_close(by_logprob, expected.by_logprob, 1e-9)
        assert_close(by_entropy, expected.by_entropy, 1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=4)
@given(rollouts=steps())
def test_float32_is_as_close_as_promised(algorithm, rollouts):
    expected = slow.total(algorithm, {}, rollouts, LIMIT)
    loss, by_logprob, _, _ = run(rollouts, section_of(algorithm, "as_it_is"), torch.float32)
    assert loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
    assert_close(by_logprob, expected.by_logprob, 1e-5)


def test_every_built_in_algorithm_is_compared():
    assert set(ALGORITHMS) <= set(known_algorithms())
    assert len(ALGORITHMS) == 13
