"""What was sampled at two servers, as one."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.types import Sampling
from telescope_train.inference.generation import (
    Generation,
    Span,
    ended,
    in_a_row,
    joined,
    sampling_after,
)

spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=5)


def generation(parts: list[tuple[int, int]], first: int = 0) -> Generation:
    num_tokens = sum(size for _, size in parts)
    return Generation(
        token_ids=array("i", range(first, first + num_tokens)),
        logprobs=array("f", [-float(one) for one in range(first, first + num_tokens)]),
        finish_reason="stop",
        spans=tuple(Span(*part) for part in parts),
    )


@settings(deadline=None)
@given(spans, spans)
def test_joined_has_every_token_once_with_its_own_version(first, second) -> None:
    begun = generation(first)
    rest = generation(second, first=len(begun.token_ids))
    whole = joined(begun, rest)
    assert list(whole.token_ids) == list(range(len(begun.token_ids) + len(rest.token_ids)))
    assert list(whole.logprobs) == [-float(one) for one in whole.token_ids]
    by_token = [version for version, size in [*first, *second] for _ in range(size)]
    assert [span.version for span in whole.spans for _ in range(span.num_tokens)] == by_token
    assert (whole.oldest_version, whole.newest_version) == (min(by_token), max(by_token))
    pairs = zip(whole.spans, whole.spans[1:], strict=False)
    assert all(one.version != other.version for one, other in pairs)


def test_nothing_before_changes_nothing() -> None:
    rest = generation([(1, 2)])
    assert joined(None, rest) is rest
    assert sampling_after(None, sampling := Sampling(max_tokens=5)) is sampling
    assert in_a_row(()) == ()


@pytest.mark.parametrize("seed", [None, 0, 12345])
def test_what_is_left_is_sampled_with_other_chances(seed) -> None:
    left = sampling_after(generation([(1, 3)]), Sampling(max_tokens=10, seed=seed))
    assert left.max_tokens == 7
    assert (left.seed is None) == (seed is None)
    further = sampling_after(generation([(1, 4)]), Sampling(max_tokens=10, seed=seed))
    assert seed is None or len({seed, left.seed, further.seed}) == 3


def test_what_had_only_its_end_to_come_is_whole() -> None:
    begun = generation([(1, 3)])
    assert ended(None, Sampling(max_tokens=3), ()) is None
    assert ended(begun, Sampling(max_tokens=4), (9,)) is None
    whole = ended(begun, Sampling(max_tokens=3), (9,))
    assert whole is not None
    assert whole.finish_reason == "length"
    whole = ended(begun, Sampling(max_tokens=9), (2,))
    assert whole is not None
    assert whole.finish_reason == "stop"
