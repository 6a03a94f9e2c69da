"""`SplitSource`: endless, distinct, disjoint, the same in whatever order it is asked."""

import pytest

from telescope_core import Example, Split, SplitSource
from telescope_core.errors import ConfigError
from telescope_core.examples import split_of


def numbers(split: Split, *, largest: int = 10**9, seed: int = 0) -> SplitSource:
    return SplitSource(
        lambda rng: Example(id=str(rng.randint(0, largest)), prompt=""), split=split, seed=seed
    )


def test_splits_are_disjoint_and_examples_distinct():
    sources = {split: numbers(split, largest=2000) for split in Split}
    ids = {split: [source.example(i).id for i in range(150)] for split, source in sources.items()}
    assert all(len(set(chosen)) == 150 for chosen in ids.values())
    assert not set(ids[Split.TRAIN]) & set(ids[Split.EVAL])
    assert all(split_of(name) is split for split in Split for name in ids[split])


def test_about_a_tenth_is_held_out():
    held_out = sum(split_of(str(number)) is Split.EVAL for number in range(20_000))
    assert held_out == pytest.approx(2000, abs=150)


def test_the_order_of_asking_does_not_matter_but_the_seed_does():
    one, other = numbers(Split.TRAIN), numbers(Split.TRAIN)
    assert [one.example(i) for i in range(30)] == [other.example(i) for i in reversed(range(30))][
        ::-1
    ]
    assert numbers(Split.TRAIN, seed=1).example(0) != one.example(0)


def test_problems_that_run_out_repeat_in_the_same_order():
    source = numbers(Split.TRAIN, largest=20)
    ids = [source.example(index).id for index in range(100)]
    period = len(set(ids))
    assert period <= 21
    assert ids[period : 2 * period] == ids[:period]


def test_a_split_without_problems_is_one_clear_message():
    constant = next(str(n) for n in range(100) if split_of(str(n)) is Split.TRAIN)
    source = SplitSource(lambda rng: Example(id=constant, prompt=""), split=Split.EVAL, seed=0)
    with pytest.raises(ConfigError, match="more problems"):
        source.example(0)
