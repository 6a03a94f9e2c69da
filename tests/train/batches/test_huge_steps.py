"""A step of more than 2^31 tokens: what is counted over it does not overflow.

The columns of such a step take 80 GB, so its samples are views of one number, and the plan, the
weights and what a step reports are computed from them as they would be from real ones.
"""

import numpy as np
import pytest

from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.even_costs import spread_evenly
from telescope_train.batches.weighting import token_weights

SEQ_LEN = 32_768
PROMPT = 768
NUM_SAMPLES = 2**31 // (SEQ_LEN - PROMPT) + 1
GROUP_SIZE = 16


@pytest.fixture(scope="module")
def step() -> list[TrainingSample]:
    """Return samples of one length; all share their three arrays."""
    mask = np.arange(SEQ_LEN) >= PROMPT
    token_ids = np.broadcast_to(np.int32(1), SEQ_LEN)
    logprobs = np.broadcast_to(np.float32(-1), SEQ_LEN)
    return [
        TrainingSample(
            token_ids=token_ids,
            mask=mask,
            behavior_logprobs=logprobs,
            advantage=1.0,
            temperature=1.0,
            oldest_version=0,
            newest_version=0,
            group_id=str(number // GROUP_SIZE),
            rollout_index=number % GROUP_SIZE,
            environment="long",
        )
        for number in range(NUM_SAMPLES)
    ]


@pytest.mark.slow
def test_every_token_of_it_weighs_the_same(step: list[TrainingSample]):
    num_trained = NUM_SAMPLES * (SEQ_LEN - PROMPT)
    weights_N = token_weights(step, "token", max_tokens=SEQ_LEN)
    assert num_trained > 2**31
    assert weights_N.tolist() == [1 / num_trained] * NUM_SAMPLES


@pytest.mark.slow
def test_it_is_dealt_whole(step: list[TrainingSample]):
    lengths_N = np.array([len(sample) for sample in step])
    assert int(lengths_N.sum()) > 2**31
    ranks = spread_evenly(lengths_N, seq_len=4 * SEQ_LEN, num_ranks=64, hidden_size=4096)
    bins = [members for rank in ranks for members in rank]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(np.concatenate(bins).tolist()) == list(range(NUM_SAMPLES))
    assert max(int(lengths_N[members].sum()) for members in bins) <= 4 * SEQ_LEN
