"""The table of algorithms: finding one, its defaults, its advantages."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from telescope_core.errors import ConfigError, UnknownNameError
from telescope_train.algorithms import known_algorithms, load_algorithm, resolved
from telescope_train.algorithms.record import OWN_SETTINGS
from telescope_train.config.schema import AlgorithmSection

GROUPS_N = np.array([0, 0, 0, 1, 1])
REWARDS_N = np.array([1.0, 0.0, 0.5, 3.0, 1.0])


def advantages(name: str, rewards_N=REWARDS_N, groups_N=GROUPS_N, norm="group") -> np.ndarray:
    return load_algorithm(name).advantage(np.asarray(rewards_N), np.asarray(groups_N), norm)


@pytest.mark.parametrize("name", known_algorithms())
def test_every_record_is_complete(name):
    algorithm = load_algorithm(name)
    assert algorithm.name == name
    assert set(algorithm.reads) <= set(OWN_SETTINGS)
    page = import_module(f"telescope_train.algorithms.{name}")
    assert f"Paper: {algorithm.paper}" in page.__doc__
    assert algorithm.has_ratio == (algorithm.use_ppo_clip is None)


def test_defaults_are_those_of_the_papers():
    found = {
        name: (one.weighting, one.use_ppo_clip, one.clip_low, one.clip_high, one.min_group_size)
        for name in known_algorithms()
        for one in [load_algorithm(name)]
    }
    plain = ("token", False, 0.2, 0.2, 2)
    papers = {
        "grpo": plain,
        "rloo": plain,
        "reinforce_pp": ("token", False, 0.2, 0.2, 1),
        "reinforce_pp_baseline": plain,
        "dr_grpo": ("constant", False, 0.2, 0.2, 2),
        "maxrl": plain,
        "cispo": ("token", None, 1.0, 4.0, 2),
        "gspo": ("sequence", None, 3e-4, 4e-4, 2),
        "gmpo": ("sequence", None, 0.33, 0.49, 2),
        "sapo": ("sequence", None, None, None, 2),
        "dppo": ("token", None, None, None, 2),
        "opd": ("token", False, 0.2, 0.2, 1),
        "dapo": ("token", True, 0.2, 0.28, 2),
    }
    assert found == papers


def test_null_settings_take_the_algorithm_s_own_and_others_stay():
    dapo = load_algorithm("dapo")
    settings = resolved(AlgorithmSection(algorithm="dapo", clip_low=0.1), dapo)
    assert (settings.use_ppo_clip, settings.clip_low, settings.clip_high) == (True, 0.1, 0.28)
    off = resolved(AlgorithmSection(algorithm="dapo", use_ppo_clip=False), dapo)
    assert off.use_ppo_clip is False


@pytest.mark.parametrize("name", known_algorithms())
def test_advantages_do_not_change_with_the_order_of_rollouts(name):
    order_N = np.array([3, 1, 4, 0, 2])
    shuffled = advantages(name, REWARDS_N[order_N], GROUPS_N[order_N])
    np.testing.assert_allclose(shuffled, advantages(name)[order_N])


@pytest.mark.parametrize("name", sorted({*known_algorithms()} - {"maxrl"}))
def test_adding_a_number_to_all_rewards_changes_nothing(name):
    np.testing.assert_allclose(advantages(name, REWARDS_N + 5.0), advantages(name), atol=1e-12)


@pytest.mark.parametrize("name", known_algorithms())
def test_equal_rewards_carry_no_signal_and_small_groups_are_refused(name):
    if name == "opd":  # It learns from another model, not from rewards.
        assert (advantages(name, [0.7, 0.0, 1.0]) == 1).all()
        return
    assert not advantages(name, [0.7] * 5).any()
    if load_algorithm(name).min_group_size == 1:
        assert advantages(name, [1.0, 0.0, 0.0], [0, 1, 2])[0] > 1
    else:
        with pytest.raises(ValueError, match="groups of at least 2 rollouts, got one of 1"):
            advantages(name, [1.0, 0.0, 0.0], [0, 1, 1])


def test_reinforce_pp_whitens_the_batch():
    advantages_N = advantages("reinforce_pp")
    assert advantages_N.mean() == pytest.approx(0, abs=1e-12)
    assert advantages_N.std(ddof=1) == pytest.approx(1, rel=1e-3)
    baseline_N = advantages("reinforce_pp_baseline")
    assert baseline_N[:3].mean() == pytest.approx(0, abs=1e-12)
    assert baseline_N.std(ddof=1) == pytest.approx(1, rel=1e-3)


def test_maxrl_divides_by_the_rate_of_success():
    advantages_N = advantages("maxrl", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0] * 4 + [1] * 4)
    np.testing.assert_allclose(advantages_N, [3, -1, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3])
    assert not advantages("maxrl", [0.0, 0.0], [0, 0]).any()
    with pytest.raises(ConfigError, match="rewards of at least 0, got -1"):
        advantages("maxrl", [-1.0, 1.0], [0, 0])


def test_an_import_path_names_a_record(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from telescope_train.algorithms.grpo import ALGORITHM as MINE\nOTHER = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_algorithm("mine:MINE").name == "grpo"
    with pytest.raises(ConfigError, match="expected an Algorithm, got int"):
        load_algorithm("mine:OTHER")
    with pytest.raises(ConfigError, match="module 'mine' has no 'MISSING'"):
        load_algorithm("mine:MISSING")
    with pytest.raises(ConfigError, match="cannot import 'nowhere_at_all'"):
        load_algorithm("nowhere_at_all:MINE")


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("weighting", "'token', 'seq"),
        ("compares", "'group', 'b"),
        ("fixed_norm", "None, 'group', "),
    ],
)
def test_a_record_is_checked_when_it_is_made(field, known):
    with pytest.raises(ConfigError, match=f"{field} of .*'grpo' must be one of {known}.*'tokens'"):
        replace(load_algorithm("grpo"), **{field: "tokens"})


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="'grpo'"):
        load_algorithm("GRPOO")
    with pytest.raises(UnknownNameError, match="'reinforce_pp'"):
        load_algorithm("reinforce++")
