import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.errors import UnknownNameError
from telescope_train.batches.weighting import token_weights

CHAINS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=8)


@settings(max_examples=60)
@given(CHAINS)
def test_weights_follow_their_sum_rules(make_sample, chains):
    samples = [make_sample(2, trained, rollout=rollout) for rollout, trained in chains]
    rollouts = np.array([rollout for rollout, _ in chains])
    trained = np.array([trained for _, trained in chains])
    num_rollouts = len(set(rollouts.tolist()))

    token = token_weights(samples, "token", max_tokens=10)
    assert len(set(token.tolist())) == 1
    assert (token * trained).sum() == pytest.approx(1.0)

    sequence = token_weights(samples, "sequence", max_tokens=10)
    for rollout in set(rollouts.tolist()):
        share = (sequence * trained)[rollouts == rollout].sum()
        assert share == pytest.approx(1 / num_rollouts)

    constant = token_weights(samples, "constant", max_tokens=10)
    assert constant == pytest.approx(np.full(len(samples), 1 / (num_rollouts * 10)))


def test_weights_follow_the_order_of_samples(make_sample):
    samples = [make_sample(1, n, rollout=n) for n in (1, 5, 2)]
    weights = token_weights(samples, "sequence", max_tokens=1)
    backwards = token_weights(samples[::-1], "sequence", max_tokens=1)
    assert weights.tolist() == backwards[::-1].tolist() == [1 / 3, 1 / 15, 1 / 6]


def test_no_samples_and_unknown_names(make_sample):
    assert token_weights([], "token", max_tokens=1).size == 0
    with pytest.raises(UnknownNameError, match="'sequence'"):
        token_weights([make_sample()], "sequences", max_tokens=1)
