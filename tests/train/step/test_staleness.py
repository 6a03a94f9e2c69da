"""Staleness is that of each token, by the weights that sampled it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.types import Span
from telescope_train.batches.batch import TrainingSample
from telescope_train.step.metrics import sample_metrics


def sample(
    spans: list[tuple[int, int]], *, known: bool = True, group_id: str = "0.0"
) -> TrainingSample:
    num_tokens = sum(size for _, size in spans)
    versions = [version for version, _ in spans]
    mask = np.arange(1 + num_tokens) > 0
    return TrainingSample(
        token_ids=np.zeros(1 + num_tokens, np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        advantage=0.0,
        temperature=1.0,
        oldest_version=min(versions),
        newest_version=max(versions),
        group_id=group_id,
        rollout_index=0,
        environment="e",
        spans=tuple(Span(*one) for one in spans) if known else (),
    )


spans = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=4)


@given(st.lists(spans, min_size=1, max_size=5))
def test_it_is_that_of_every_token_by_itself(samples) -> None:
    row = sample_metrics([sample(one) for one in samples], 5, max_async_rollout=5)
    ages = [5 - version for one in samples for version, size in one for _ in range(size)]
    assert row["staleness/mean"] == pytest.approx(np.mean(ages))
    assert row["staleness/max"] == max(ages)
    shares = {name: share for name, share in row.items() if name.startswith("staleness/share_")}
    assert shares == {
        f"staleness/share_{age}": pytest.approx(ages.count(age) / len(ages)) for age in set(ages)
    }


def test_a_sample_of_which_only_the_ends_are_known_counts_as_old() -> None:
    row = sample_metrics([sample([(1, 3), (4, 5)], known=False)], 4, max_async_rollout=4)
    assert (row["staleness/mean"], row["staleness/share_3"]) == (3.0, 1.0)


def test_no_samples_have_no_staleness() -> None:
    assert sample_metrics([], 3, max_async_rollout=1) == {}


def test_tokens_of_weights_that_were_replaced_before_their_batch_began_are_undelivered() -> None:
    """Batch 7 begins once version 6 is live, one step ahead: no token of it may be of version 5."""
    spans = [(5, 3), (6, 1), (7, 4)]
    row = sample_metrics([sample(spans, group_id="7.2-1")], 7, max_async_rollout=1)
    assert row["staleness/undelivered"] == 3 / 8
    row = sample_metrics([sample(spans, group_id="7.2-1")], 7, max_async_rollout=2)
    assert row["staleness/undelivered"] == 0.0
