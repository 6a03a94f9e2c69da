import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.base.chains import ChainRecorder, sampled_tokens
from telescope_core.errors import EndpointError
from telescope_core.types import Completion, Message, Rollout, Span, Turn
from telescope_train.batches.samples import (
    branched_fraction,
    num_cuts_continued,
    samples_from_rollout,
)


def turn(prompt_ids, completion_ids, *, logprobs=None, versions=(0, 0)) -> Turn:
    if logprobs is None:
        logprobs = [-0.1 * token for token in completion_ids]
    completion = Completion(
        message=Message(role="assistant", content=""),
        finish_reason="stop",
        tokens=sampled_tokens(prompt_ids, completion_ids, logprobs),
        oldest_version=versions[0],
        newest_version=versions[1],
    )
    return Turn(completion=completion, started_s=0.0, ended_s=1.0)


def rollout(*turns: Turn) -> Rollout:
    return Rollout(environment="toy", example_id="e", group_id="g7", index=3, turns=turns)


def test_one_turn_is_one_sample():
    (sample,) = samples_from_rollout(rollout(turn([1, 2], [3, 4], versions=(5, 6))), 0.5, 0.7)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.mask.tolist() == [False, False, True, True]
    np.testing.assert_allclose(sample.behavior_logprobs, [math.nan, math.nan, -0.3, -0.4])
    assert (sample.advantage, sample.temperature) == (0.5, 0.7)
    assert (sample.oldest_version, sample.newest_version) == (5, 6)
    assert (sample.group_id, sample.rollout_index, sample.environment) == ("g7", 3, "toy")


def test_a_turn_that_continues_extends_its_chain_and_masks_the_bridge():
    first, second = turn([1], [2, 3], versions=(4, 4)), turn([1, 2, 3, 8, 9], [5], versions=(4, 6))
    (sample,) = samples_from_rollout(rollout(first, second), 1.0, 1.0)
    assert sample.token_ids.tolist() == [1, 2, 3, 8, 9, 5]
    assert sample.mask.tolist() == [False, True, True, False, False, True]
    assert (sample.oldest_version, sample.newest_version) == (4, 6)


def test_a_turn_that_goes_on_where_another_ended_adds_nothing_in_between():
    (sample,) = samples_from_rollout(rollout(turn([1], [2]), turn([1, 2], [3])), 1.0, 1.0)
    assert sample.token_ids.tolist() == [1, 2, 3]
    assert sample.mask.tolist() == [False, True, True]


def test_a_rewritten_history_starts_a_chain_and_is_trained_once():
    first, second = turn([1], [2, 3, 4]), turn([1, 4, 9], [5])
    one, two = samples_from_rollout(rollout(first, second), 1.0, 1.0)
    assert one.token_ids[one.mask].tolist() == [2, 3, 4]
    assert two.token_ids.tolist() == [1, 4, 9, 5]
    assert two.token_ids[two.mask].tolist() == [5]


def test_a_turn_continues_the_longest_chain_it_starts_with():
    turns = turn([1], [2]), turn([1, 7], [3]), turn([1, 2, 6], [4])
    one, two = samples_from_rollout(rollout(*turns), 1.0, 1.0)
    assert one.token_ids.tolist() == [1, 2, 6, 4]
    assert two.token_ids.tolist() == [1, 7, 3]


def test_of_chains_that_begin_alike_the_longest_is_continued_also_if_it_is_the_older_one():
    turns = turn([1, 2, 6], [4]), turn([1], [2]), turn([1, 2, 6, 4, 9], [5])
    one, two = samples_from_rollout(rollout(*turns), 1.0, 1.0)
    assert one.token_ids.tolist() == [1, 2, 6, 4, 9, 5]
    assert two.token_ids.tolist() == [1, 2]


def test_spans_are_those_of_all_turns_and_where_they_are_unknown_all_is_old():
    known = turn([1], [2, 3], versions=(4, 6))
    spans = (Span(4, 1), Span(6, 1))
    known = replace(known, completion=replace(known.completion, spans=spans))
    (sample,) = samples_from_rollout(
        rollout(known, turn([1, 2, 3], [5, 6, 7], versions=(3, 8))), 1.0, 1.0
    )
    assert sample.spans == (*spans, Span(3, 3), Span(8, 0))
    assert (sample.oldest_version, sample.newest_version) == (3, 8)


def test_no_turn_gives_no_sample():
    assert samples_from_rollout(rollout(), 1.0, 1.0) == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (turn([1], [2, 3], logprobs=[-1.0]), r"\b1 log-probs.*\b2 completion"),
        (turn([1], [2, 3], logprobs=[]), r"\b0 log-probs.*\b2 completion"),
        (turn([1], [2], logprobs=[math.nan]), "finite"),
        (turn([1], [2], logprobs=[-math.inf]), "finite"),
        (turn([], [2]), r"\b0 prompt"),
        (turn([1], []), r"\b0 completion"),
        (
            replace(turn([1], [2]), completion=replace(turn([1], [2]).completion, tokens=None)),
            r"\b0 prompt ids and 0 completion ids",
        ),
    ],
)
def test_what_was_not_recorded_is_never_made_up(bad, said):
    with pytest.raises(EndpointError, match=said) as caught:
        samples_from_rollout(rollout(turn([1], [2]), bad), 1.0, 1.0)
    for place in ("turn 1", "rollout 3", "'g7'"):
        assert place in str(caught.value)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.integers(0, 4), min_size=1, max_size=3),
            st.lists(st.integers(0, 4), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_is_trained_exactly_once(steps):
    turns, context = [], []
    for continues, bridge, completion in steps:
        prompt = [*context, *bridge] if continues else bridge
        turns.append(turn(prompt, completion))
        context = [*prompt, *completion]
    samples = samples_from_rollout(rollout(*turns), 1.0, 1.0)
    sampled = sorted(token for _, _, completion in steps for token in completion)
    assert sorted(t for s in samples for t in s.token_ids[s.mask].tolist()) == sampled
    for sample in samples:
        np.testing.assert_array_equal(np.isnan(sample.behavior_logprobs), ~sample.mask)
        trained = sample.behavior_logprobs[sample.mask]
        np.testing.assert_allclose(trained, -0.1 * sample.token_ids[sample.mask], rtol=1e-6)


@st.composite
def branching_turns(draw):
    """Turns that each continue any earlier turn, all of it or a part, or nothing."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        context: list[int] = []
        if turns and draw(st.booleans()):
            known = draw(st.sampled_from(turns)).completion
            context = [*known.prompt_ids, *known.completion_ids]
            if draw(st.booleans()):
                context = context[: draw(st.integers(0, len(context)))]
        written = draw(tokens)
        # The log-probs say which turn, and which of its tokens.
        logprobs = [-(number + 1) - place / 8 for place in range(len(written))]
        made = turn([*context, *draw(tokens)], written, logprobs=logprobs)
        turns.append(replace(made, temperature=draw(st.sampled_from([None, 1.0, 0.5]))))
    return turns


def stitched_slowly(turns, temperature):
    """The obvious version: (token, log-prob or None) pairs, compared one by one."""
    chains: list[tuple[float, list[tuple[int, float | None]]]] = []
    for one in turns:
        prompt = list(one.completion.prompt_ids)
        at = temperature if one.temperature is None else one.temperature
        best = None
        for number, (known_at, chain) in enumerate(chains):
            ids = [token for token, _ in chain]
            fits = known_at == at and len(ids) <= len(prompt) and prompt[: len(ids)] == ids
            if fits and (best is None or len(ids) > len(chains[best][1])):
                best = number
        if best is None:
            best = len(chains)
            chains.append((at, []))
        chain = chains[best][1]
        chain += [(token, None) for token in prompt[len(chain) :]]
        chain += zip(one.completion.completion_ids, one.completion.logprobs, strict=True)
    return chains


@settings(max_examples=50)
@given(branching_turns())
def test_any_tree_of_turns_trains_each_token_once_under_its_own_prompt(turns):
    samples = samples_from_rollout(rollout(*turns), 0.25, 1.0)
    for one in turns:
        prompt, written = one.completion.prompt_ids, one.completion.completion_ids
        homes = [s for s in samples if one.completion.logprobs[0] in s.behavior_logprobs]
        assert len(homes) == 1
        (home,) = homes
        whole = [*prompt, *written]
        assert home.token_ids[: len(whole)].tolist() == whole
        place = slice(len(prompt), len(whole))
        assert home.mask[place].all()
        assert home.behavior_logprobs[place].tolist() == list(one.completion.logprobs)
        assert home.temperature == (one.temperature or 1.0)
    assert sum(int(s.mask.sum()) for s in samples) == sum(
        len(one.completion.completion_ids) for one in turns
    )
    assert {s.advantage for s in samples} == {0.25}
    # The turns of all samples are those of the rollout, each once, with its own log-probs.
    by_turn = {}
    for sample in samples:
        trained = iter(sample.behavior_logprobs[sample.mask].tolist())
        by_turn |= {number: [next(trained) for _ in range(n)] for number, n in sample.turns}
        assert not list(trained)
    assert sum(len(sample.turns) for sample in samples) == len(by_turn)
    assert by_turn == {number: list(one.completion.logprobs) for number, one in enumerate(turns)}


@settings(max_examples=50)
@given(branching_turns())
def test_chains_are_those_of_the_obvious_version(turns):
    samples = samples_from_rollout(rollout(*turns), 1.0, 1.0)
    expected = stitched_slowly(turns, 1.0)
    assert [s.token_ids.tolist() for s in samples] == [
        [token for token, _ in chain] for _, chain in expected
    ]
    assert [s.temperature for s in samples] == [at for at, _ in expected]
    for sample, (_, chain) in zip(samples, expected, strict=True):
        trained = [math.nan if value is None else value for _, value in chain]
        np.testing.assert_array_equal(sample.behavior_logprobs, np.array(trained, np.float32))
    fraction = (len(expected) - 1) / max(1, len(turns) - 1)
    assert branched_fraction(samples, [rollout(*turns), rollout()]) == fraction


def test_a_turn_at_another_temperature_is_a_sample_of_its_own():
    first, second = turn([1], [2]), replace(turn([1, 2, 6], [4]), temperature=0.5)
    one, two = samples_from_rollout(rollout(first, second), 1.0, 0.8)
    assert (one.temperature, two.temperature) == (0.8, 0.5)
    assert two.token_ids.tolist() == [1, 2, 6, 4]
    assert two.mask.tolist() == [False, False, False, True]


@pytest.mark.parametrize("is_one_chain", [True, False])
def test_turns_that_were_cut_count_once_a_later_turn_continues_them(is_one_chain):
    recorder = ChainRecorder()

    def played(prompt_ids, completion_ids, *, cut=False) -> Turn:
        made = turn(prompt_ids, completion_ids)
        tokens = recorder.record(prompt_ids, completion_ids, made.completion.logprobs)
        tokens = tokens if is_one_chain else made.completion.tokens
        completion = replace(made.completion, tokens=tokens)
        return replace(
            made, completion=replace(completion, finish_reason="length") if cut else completion
        )

    first, second = played([1], [2, 3], cut=True), played([1, 2, 3, 9], [4])
    other, third = played([7], [2, 3], cut=True), played([1, 2, 3, 9, 4, 9], [5], cut=True)
    unknown = replace(third, completion=replace(third.completion, tokens=None))
    for turns, expected in (
        ((first, second), 1),
        ((second, third), 0),  # the first of them ended by itself
        ((first, other), 0),
        ((first, other, second, third), 1),  # as seats of a match, in turn
        ((first, unknown), 0),
        ((unknown, second), 0),
        ((first,), 0),
    ):
        assert num_cuts_continued([rollout(*turns), rollout()]) == expected
