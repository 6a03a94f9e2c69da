"""Which settings of a run are not as they are by default."""

from telescope_core.settings.differing import flat_settings
from telescope_train.config.origin import origin_of
from telescope_train.plan.load import load_train_config

RUN = ["--name", "toy", "--number_of_steps", "10", "--model", "a/b"]
MATHS = '[{"name": "math-reasoning", "weight": 2.0, "env": {"level": "digit"}}]'
ENTRY = "environments.math-reasoning"
GIVEN = {
    *("run.name", "run.number_of_steps", "model.model", "rollout.group_size"),
    *(f"{ENTRY}.{name}" for name in ("name", "weight", "env")),
}


def test_what_was_chosen_and_every_default_are_known():
    config = load_train_config([], [*RUN, "--environments", MATHS, "--group_size", "4"])
    origin = origin_of(config)
    # use_tis is decided by what the algorithm is.
    expected = {*GIVEN, "algorithm.use_tis"}
    assert set(origin.chosen) == expected
    size, weight, steps = "rollout.group_size", f"{ENTRY}.weight", "run.number_of_steps"
    assert (origin.defaults[size], origin.defaults[weight]) == (8, 1.0)
    assert steps not in origin.defaults


def test_every_setting_has_a_default_or_was_chosen():
    config = load_train_config([], [*RUN, "--environments", MATHS])
    origin = origin_of(config)
    chosen = tuple(origin.chosen)
    others = flat_settings(config.model_dump(mode="json"))
    assert len(others) > 100
    for name, value in others.items():
        assert name.startswith(chosen) or origin.defaults[name] == value, name


def test_a_value_that_is_the_default_was_not_changed():
    size = "rollout.group_size"
    origin = origin_of(load_train_config([], [*RUN, "--environments", MATHS, "--group_size", "8"]))
    assert size in origin.given
    assert size not in origin.chosen


def test_what_was_set_is_told_from_what_is_so_by_default(tmp_path):
    (tmp_path / "run.toml").write_text("[rollout]\ntemperature = 1.0\n")
    flags = [*RUN, "--environments", MATHS, "--group_size", "8"]
    origin = origin_of(load_train_config([tmp_path / "run.toml"], flags))
    expected = {*GIVEN, "rollout.temperature"}
    assert set(origin.given) == expected
    # use_tis is decided by what the algorithm is, and so neither set nor as by default.
    assert set(origin.chosen) - set(origin.given) == {"algorithm.use_tis"}
