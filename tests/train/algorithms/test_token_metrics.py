import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_train.algorithms.terms import Terms, metric_sums, shared_metrics
from telescope_train.algorithms.token_metrics import MetricSum, metric_row, reduce_metrics


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_metrics_do_not_depend_on_how_tokens_are_split(tokens, size):
    values_T = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    mask_T = torch.tensor([is_trained for _, is_trained in tokens])
    whole = metric_sums({"entropy": values_T, "mismatch": values_T}, mask_T)
    parts = [
        metric_sums({"entropy": values, "mismatch": values}, mask)
        for values, mask in zip(values_T.split(size), mask_T.split(size), strict=True)
    ]
    merged = metric_row(reduce_metrics(parts))
    assert merged == pytest.approx(metric_row(whole))
    kept = values_T[mask_T]
    if len(kept):
        assert merged["entropy"] == pytest.approx(kept.mean().item())
        assert merged["mismatch/max"] == kept.max().item()
    else:
        assert merged == {}


def test_mismatch_looks_only_at_tokens_of_the_version_being_trained():
    terms = Terms(
        logprobs_T=torch.tensor([-1.0, -2.0, 0.0, -1.0]),
        behavior_logprobs_T=torch.tensor([-1.5, -5.0, 0.0, -0.8]),
        advantages_T=torch.ones(4),
        mask_T=torch.tensor([True, True, False, True]),
        sequence_ids_T=torch.zeros(4, dtype=torch.long),
        entropy_T=torch.ones(4),
    )
    same_version_T = torch.tensor([True, False, True, True])
    sums = shared_metrics(terms, same_version_T=same_version_T)
    row = metric_row(sums)
    assert row["mismatch/max"] == pytest.approx(0.5)
    assert row["mismatch/mean"] == pytest.approx((0.5 + 0.2) / 2)
    k3 = [math.exp(gap) - 1 - gap for gap in (0.5, -0.2)]
    assert row["mismatch/k3"] == pytest.approx(sum(k3) / 2)
    weights = [math.exp(gap) for gap in (0.5, 3, -0.2)]
    assert row["importance_weight/mean"] == pytest.approx(sum(weights) / 3)
    assert row["entropy"] == pytest.approx(1.0)


def test_a_metric_over_no_token_is_absent():
    terms = Terms(
        logprobs_T=torch.zeros(2),
        behavior_logprobs_T=torch.zeros(2),
        advantages_T=torch.zeros(2),
        mask_T=torch.tensor([True, True]),
        sequence_ids_T=torch.zeros(2, dtype=torch.long),
        entropy_T=torch.ones(2),
    )
    nowhere_T = torch.tensor([False, False])
    row = metric_row(shared_metrics(terms, same_version_T=nowhere_T))
    assert not any(name.startswith("mismatch") for name in row)
    assert reduce_metrics([]) == {}
    assert metric_sums({}, nowhere_T) == {}


def test_a_mask_that_is_true_everywhere_gives_the_same_sums():
    generator = torch.Generator().manual_seed(0)
    eighths = torch.randint(-40, 40, (9,), generator=generator) / 8  # every sum is exact
    values = {
        "float": eighths,
        "double": eighths.double() + 1,
        "some": torch.rand(9, generator=generator) < 0.5,
        "all": torch.ones(9, dtype=torch.bool),
        "none": torch.zeros(9, dtype=torch.bool),
    }
    longer = {name: torch.cat([value, value[:2]]) for name, value in values.items()}
    mask_T = torch.arange(11) < 9
    assert metric_sums(values, mask_T[:9]) == metric_sums(longer, mask_T)


def test_weights_that_are_all_zero_stand_for_no_sample():
    none = MetricSum(total=0.0, count=3.0, lowest=0.0, highest=0.0)
    names = (f"effective_sample_size/{part}" for part in ("weight", "square"))
    assert metric_row(dict.fromkeys(names, none)) == {"effective_sample_size": 0.0}
