"""What was sampled at two servers, as one."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.types import Sampling
from telescope_train.inference.generation import (
    Generation,
    Request,
    Span,
    ended,
    in_a_row,
    joined,
    sampling_after,
    until_stop,
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
    request = Request(prompt_ids=[5], sampling=Sampling(max_tokens=3), stop_token_ids=(9,))
    assert ended(request) is None
    request = replace(request, begun=generation([(1, 3)]))
    assert ended(replace(request, sampling=Sampling(max_tokens=4))) is None
    whole = ended(request)
    assert whole is not None
    assert whole.finish_reason == "length"
    whole = ended(replace(request, sampling=Sampling(max_tokens=9), stop_token_ids=(2,)))
    assert whole is not None
    assert whole.finish_reason == "stop"


def said(text: str, version: int = 1) -> Generation:
    """One token for each character."""
    ids = [ord(one) for one in text]
    spans = (Span(version, len(ids)),)
    logprobs = array("f", [-float(one) for one in ids])
    return Generation(
        token_ids=array("i", ids), logprobs=logprobs, finish_reason="length", spans=spans
    )


def text_of(token_ids) -> str:
    return "".join(map(chr, token_ids))


@given(
    st.text("ab", min_size=2, max_size=20),
    st.integers(1, 19),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
)
def test_a_stop_text_that_two_servers_sampled_ends_what_they_sampled(text, at, stop) -> None:
    at = min(at, len(text) - 1)
    found = until_stop(joined(said(text[:at]), said(text[at:], version=2)), stop, text_of)
    # As slowly as a server does: after each token.
    shown = next(
        (text[:end] for end in range(1, len(text) + 1) if any(one in text[:end] for one in stop)),
        None,
    )
    expected = text if shown is None else shown
    assert text_of(found.token_ids) == expected
    assert list(found.logprobs) == [-float(one) for one in found.token_ids]
    versions = [span.version for span in found.spans for _ in range(span.num_tokens)]
    assert versions == [1 if place < at else 2 for place in range(len(expected))]
    assert found.finish_reason == ("length" if shown is None else "stop")


def test_what_one_server_sampled_is_not_looked_through() -> None:
    whole = said("abba")
    assert until_stop(whole, ["b"], text_of) is whole
