"""When a run is diagnosed: often, but in no more time for a step the longer it is."""

from telescope_train.run import is_diagnosed


def diagnosed(first: int, last: int) -> list[int]:
    return [step for step in range(first, last + 1) if is_diagnosed(step, step)]


def test_early_steps_are_diagnosed_one_by_one_and_later_ones_at_intervals():
    assert diagnosed(1, 20) == list(range(1, 21))
    assert diagnosed(21, 999) == list(range(25, 1000, 5))


def test_in_a_long_run_all_steps_are_looked_at_about_a_hundred_times_while_it_doubles():
    for num_steps in (1000, 10_000, 50_000):
        assert 50 <= len(diagnosed(num_steps, 2 * num_steps)) <= 120
