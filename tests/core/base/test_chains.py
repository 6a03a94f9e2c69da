"""Chains of tokens: each token stored once, each turn as it was sampled."""

import tracemalloc
from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.base.chains import ChainRecorder, Routes, chains_of, sampled_tokens


def num_stored(places) -> int:
    """Return how many ids and log-probs are held."""
    return sum(len(chain.own_ids) + len(chain.logprobs) for chain in chains_of(places))


def record(*turns, temperatures=None):
    recorder = ChainRecorder()
    return [
        recorder.record(prompt, said, [-0.5] * len(said), temperature=(temperatures or {}).get(n))
        for n, (prompt, said) in enumerate(turns)
    ]


def test_a_turn_that_goes_on_adds_only_what_is_new():
    first, second = record(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]))
    assert first.chain is second.chain
    assert first.chain.own_ids == array("i", [1, 2, 3, 4, 5, 6])
    assert len(first.chain.logprobs) == 3
    # The first turn is still what it was, although its chain has grown.
    assert (first.prompt_ids, first.completion_ids) == (array("i", [1, 2]), array("i", [3, 4]))
    assert second.prompt_ids == array("i", [1, 2, 3, 4, 5])


def test_a_rewritten_history_shares_what_comes_before_the_difference():
    first, second, third = record(([1, 2], [9, 3]), ([1, 2, 3, 4], [9, 5]), ([1, 2, 3, 4, 5], [6]))
    assert second.chain.parent is first.chain
    assert second.chain.num_shared == 2
    assert third.chain.parent is second.chain
    assert third.chain.num_shared == 4
    assert num_stored((first, second, third)) == 4 + 2 + 4 + 2 + 2 + 1
    assert third.prompt_ids == array("i", [1, 2, 3, 4, 5])


def test_what_an_earlier_chain_shares_is_named_where_it_is_stored():
    first, second, third = record(([1, 2, 3], [4]), ([1, 2, 7], [8]), ([1, 2, 9], [9]))
    assert second.chain.parent is first.chain
    assert third.chain.parent is first.chain


def test_another_temperature_is_another_chain():
    places = record(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]), temperatures={1: 0.5})
    assert places[0].chain is places[2].chain is not places[1].chain
    assert places[1].chain.num_shared == 2


def test_places_are_equal_by_what_they_hold():
    alone = sampled_tokens([1, 2, 3], [4], [-1.0])
    _, chained = record(([1, 2], [3]), ([1, 2, 3], [4]))
    assert alone != chained
    assert sampled_tokens([1, 2, 3], [4], [-0.5]) == chained
    assert alone != 3


def test_log_probs_that_are_missing_stay_missing():
    recorder = ChainRecorder()
    short = recorder.record([1], [2, 3], [-1.0])
    after = recorder.record([1, 2, 3], [4], [-2.0])
    assert (short.num_completion_ids, short.num_logprobs) == (2, 1)
    assert after.logprobs == array("f", [-2.0])


@st.composite
def conversations(draw):
    """Turns that go on from any earlier one: straight, branched, rewritten, compacted, anew."""
    few = st.lists(st.integers(0, 2), max_size=4)
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 12))):
        known: list[int] = []
        if turns and draw(st.integers(0, 3)):
            prompt, said = turns[-1] if draw(st.booleans()) else draw(st.sampled_from(turns))
            known = [*prompt, *said]
            change = draw(st.sampled_from(["none", "none", "cut", "drop"]))
            at = draw(st.integers(0, len(known)))
            if change == "cut":
                known = known[:at]
            elif change == "drop":
                known = known[:at] + known[draw(st.integers(at, len(known))) :]
        turns.append(([*known, *draw(few)], draw(few)))
    return turns


@pytest.mark.slow
@settings(max_examples=50)
@given(conversations(), st.data())
def test_every_turn_is_what_was_sampled(turns, data):
    recorder = ChainRecorder()
    places = []
    for number, (prompt, said) in enumerate(turns):
        logprobs = [-number - place / 8 for place in range(len(said))]
        temperature = data.draw(st.sampled_from([1.0, 1.0, 0.5]))
        places.append(recorder.record(prompt, said, logprobs, temperature=temperature))
    for number, ((prompt, said), place) in enumerate(zip(turns, places, strict=True)):
        assert place.prompt_ids.tolist() == prompt
        assert place.completion_ids.tolist() == said
        assert place.token_ids.tolist() == [*prompt, *said]
        assert place.logprobs.tolist() == [-number - at / 8 for at in range(len(said))]
    for one in chains_of(places):
        assert one.parent is None or one.num_shared > one.parent.num_shared or not one.num_shared
    assert num_stored(places) <= sum(len(prompt) + 2 * len(said) for prompt, said in turns)


def said_by(number, num_tokens) -> Routes:
    """Routes of 2 layers with 1 expert each that name the request and the token."""
    numbers = [one for token in range(num_tokens) for one in (number, token)]
    return Routes(experts=array("h", numbers).tobytes(), num_layers=2, num_chosen=1)


@settings(max_examples=30)
@given(conversations(), st.data())
def test_a_token_keeps_the_routes_of_the_first_request_that_computed_it(turns, data):
    recorder, places, expected = ChainRecorder(), [], {}

    def owner(place, position):
        chain = place.chain
        while position < chain.num_shared:
            chain = chain.parent
        return id(chain), position

    for number, (prompt, said) in enumerate(turns):
        # The last token was sampled and not computed; a server may say less than that, or nothing.
        num_said = max(0, len(prompt) + len(said) - data.draw(st.sampled_from([1, 1, 1, 3])))
        routes = said_by(number, num_said) if data.draw(st.integers(0, 4)) else None
        temperature = data.draw(st.sampled_from([1.0, 1.0, 0.5]))
        place = recorder.record(
            prompt, said, [-1.0] * len(said), temperature=temperature, routes=routes
        )
        places.append(place)
        for position in range(num_said if routes else 0):
            expected.setdefault(owner(place, position), [number, position])
    for place in places:
        if place.routes is None:
            assert not any(owner(place, at) in expected for at in range(place.completion_end))
            continue
        found = array("h", place.routes.experts).tolist()
        rows = [expected.get(owner(place, at), [-1, -1]) for at in range(place.completion_end)]
        assert found == [one for row in rows for one in row]
    num_bytes = sum(len(chain.own_routes) for chain in chains_of(places))
    assert num_bytes <= 4 * sum(len(chain.own_ids) for chain in chains_of(places))


def test_routes_of_another_shape_are_refused():
    recorder = ChainRecorder()
    recorder.record([1], [2], [-1.0], routes=said_by(0, 1))
    other = Routes(experts=b"abcdef", num_layers=1, num_chosen=3)
    with pytest.raises(ValueError, match=r"\(2, 1\) .* \(1, 3\)"):
        recorder.record([1, 2], [3], [-1.0], routes=other)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_any_part_of_a_chain_can_be_read(ids, data):
    recorder = ChainRecorder()
    known: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        known = known[: data.draw(st.integers(0, len(known)))] + ids
        place = recorder.record(known, [7], [-1.0])
        start = data.draw(st.integers(0, len(known)))
        stop = data.draw(st.integers(0, len(known)))
        assert place.chain.token_ids(start, stop).tolist() == known[start:stop]


def long_turns(num_turns=40, num_tokens=32_768):
    """Yield (prompt, completion) of one straight rollout, half of it sampled."""
    piece = num_tokens // num_turns // 2
    known = array("i")
    for number in range(num_turns):
        known += array("i", range(number * 1000, number * 1000 + piece))
        said = array("i", range(100_000 + number, 100_000 + number + piece))
        yield known, said
        known = known + said


def test_a_long_rollout_holds_each_token_once():
    """Measure: all that is held for 40 turns, against 4 + 4 bytes a token of id and log-prob."""
    recorder = ChainRecorder()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    places = [recorder.record(prompt, said, [-0.5] * len(said)) for prompt, said in long_turns()]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_tokens = places[-1].completion_end
    assert num_tokens == pytest.approx(32_768, rel=0.02)
    assert after - before <= 1.2 * 8 * num_tokens


def test_a_history_rewritten_in_every_turn_is_stored_once_too():
    """Each turn thinks for 200 tokens, says 50, and later prompts show what was said alone."""
    recorder = ChainRecorder()
    shown: list[int] = []
    places = []
    for number in range(100):
        shown += range(10_000 + number, 10_050 + number)
        said = [*range(500_000 + number, 500_200 + number), *range(number, number + 50)]
        places.append(recorder.record(shown, said, [-0.5] * len(said)))
        assert places[-1].prompt_ids.tolist() == shown
        shown = [*shown, *said[200:]]
    num_new = 100 * (50 + 250 + 250 + 50)
    assert num_stored(places) <= num_new
    assert num_new * 5 < sum(place.completion_end for place in places)
    assert all(later.chain is not earlier.chain for earlier, later in pairwise(places))
