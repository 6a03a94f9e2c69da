"""The draw over environments: weighted, seeded, without replacement within an epoch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.errors import ConfigError
from telescope_train.rollouts.draw import Drawn, ExampleDraw, Source


def draw_of(*, size: int | None = None, seed: int = 0) -> ExampleDraw:
    return ExampleDraw(
        [
            Source(environment="a", weight=0.7, num_examples=size),
            Source(environment="b", weight=0.3, num_examples=None),
        ],
        seed=seed,
    )


def test_shares_follow_the_weights() -> None:
    draw = draw_of()
    counts = Counter(draw.next().environment for _ in range(4000))
    assert abs(counts["a"] / 4000 - 0.7) < 0.03


@given(size=st.integers(1, 30), seed=st.integers(0, 1000))
def test_an_epoch_visits_every_example_once(size: int, seed: int) -> None:
    draw = ExampleDraw([Source(environment="a", weight=1.0, num_examples=size)], seed=seed)
    for _ in range(3):
        epoch = [draw.next().example_index for _ in range(size)]
        assert sorted(epoch) == list(range(size))


def test_epochs_differ_in_order() -> None:
    draw = ExampleDraw([Source(environment="a", weight=1.0, num_examples=50)], seed=1)
    first, second = ([draw.next().example_index for _ in range(50)] for _ in range(2))
    assert first != second


def test_equal_seeds_give_equal_draws_and_a_position_can_be_reached() -> None:
    one, other = draw_of(size=7), draw_of(size=7)
    drawn = [one.next() for _ in range(40)]
    other.skip_to(25)
    assert [other.next() for _ in range(15)] == drawn[25:]
    assert other.position == 40
    assert sum(other.taken.values()) == 40


@given(size=st.integers(2, 30), rejected=st.integers(0, 29), place=st.integers(0, 9))
def test_a_replacement_is_another_example_and_follows_from_its_place(
    size: int, rejected: int, place: int
) -> None:
    draw = draw_of(size=size)
    before = Drawn(environment="a", example_index=rejected % size)
    found = draw.replacement(before, f"3.{place}-2")
    assert found != before
    if found.environment == "a":
        assert 0 <= found.example_index < size
    draw.skip_to(5)
    assert draw.replacement(before, f"3.{place}-2") == found
    assert draw.position == 5, "what comes in order stays as it is"


@given(size=st.integers(1, 20), held=st.frozensets(st.integers(0, 25)))
def test_what_evals_hold_out_is_never_drawn_also_where_the_split_has_no_such_row(
    size: int, held: frozenset[int]
) -> None:
    left = sorted(set(range(size)) - held)
    options = {"environment": "a", "weight": 1.0, "num_examples": size, "held_out": held}
    if not left:
        with pytest.raises(ConfigError, match=f"all {size} examples"):
            Source(**options)
        return
    source = Source(**options)
    assert source.num_left == len(left)
    assert [source.index(place) for place in range(len(left))] == left
    assert [source.place(index) for index in left] == list(range(len(left)))
    draw = ExampleDraw([source], seed=0)
    assert sorted(draw.next().example_index for _ in left) == left
    rejected = Drawn(environment="a", example_index=left[-1])
    found = {draw.replacement(rejected, f"0.0-{n}").example_index for n in range(9)}
    assert found <= set(left[:-1] or left)


def test_replacements_reach_every_other_example() -> None:
    draw = ExampleDraw([Source(environment="a", weight=1.0, num_examples=6)], seed=0)
    rejected = Drawn(environment="a", example_index=2)
    found = {draw.replacement(rejected, f"0.0-{n}").example_index for n in range(200)}
    assert found == {0, 1, 3, 4, 5}


def test_replacements_from_an_endless_split_reach_every_other_spare() -> None:
    draw = ExampleDraw([Source(environment="a", weight=1.0, num_examples=None)], seed=0)
    for index in (1, 5):
        rejected = Drawn(environment="a", example_index=index)
        found = {draw.replacement(rejected, f"0.0-{n}").example_index for n in range(1000)}
        assert found == set(range(1, 128, 2)) - {index}
