"""What a release changes for its users, and which changes want a major version."""

import pytest
from tests.envs.projects import toy_publication

from telescope_envs.records.changes import (
    changes_between,
    score_warnings,
)
from telescope_envs.records.reading import read_releases
from telescope_envs.records.release import (
    Dataset,
    RewardRange,
)
from telescope_envs.rules.admission import index_line

WEIGHTS = {"correct": 0.9, "short": 0.1}
BEFORE = toy_publication(reward_weights=WEIGHTS).release


def after(version="0.1.1", **fields):
    return toy_publication(version).release.changed(**{"reward_weights": WEIGHTS, **fields})


def test_equal_releases_change_nothing():
    assert changes_between(BEFORE, after()) == []
    turned = dict(reversed(WEIGHTS.items()))
    assert changes_between(BEFORE, after(reward_weights=turned)) == []


def test_weights_that_a_release_does_not_record_are_no_change():
    line = index_line(toy_publication("0.1.1").release)
    assert b"reward_weights" not in line
    (old,) = read_releases(line, "acme/toy", "index").releases
    assert changes_between(BEFORE, old) == changes_between(old, BEFORE) == []
    line = index_line(BEFORE)
    assert read_releases(line, "acme/toy", "index").releases == [BEFORE]


@pytest.mark.parametrize(
    ("fields", "told", "is_of_scores"),
    [
        (
            {"reward": RewardRange(minimum=-1, maximum=1, success=1)},
            "reward range: 0 to 1 -> -1 to 1",
            True,
        ),
        (
            {"reward": RewardRange(minimum=0, maximum=1, success=0.5)},
            "success threshold: 1 -> 0.5",
            True,
        ),
        (
            {"reward_weights": {"solved": 1.0}},
            "rewards: correct 0.9, short 0.1 -> solved 1.0",
            True,
        ),
        (
            {"reward_weights": {"correct": 0.9, "short": 0.2}},
            "rewards: correct 0.9, short 0.1 -> correct 0.9, short 0.2",
            True,
        ),
        (
            {"reward_weights": {}},
            "rewards: correct 0.9, short 0.1 -> no weighted sum",
            True,
        ),
        (
            {"splits": {"train": None, "eval": 1}},
            "splits: eval 1, train 1 -> eval 1, train endless",
            True,
        ),
        (
            {"requires_dist": ("numpy>=2", "telescope-core")},
            "dependencies: telescope-core -> numpy>=2, telescope-core",
            False,
        ),
        ({"config_schema_sha256": "1" * 64}, f"settings schema: {'0' * 12} -> {'1' * 12}", False),
        ({"network": "load"}, "network: none -> load", False),
        ({"secrets": ("KEY",)}, "secrets: none -> KEY", False),
        ({"license": "Apache-2.0"}, "license: MIT -> Apache-2.0", False),
        (
            {"datasets": (Dataset(repo="a/b", revision="c" * 40),)},
            f"datasets: none -> a/b@{'c' * 12}",
            False,
        ),
    ],
)
def test_each_change_is_told_and_those_of_scores_are_warned_of(fields, told, is_of_scores):
    assert [str(change) for change in changes_between(BEFORE, after(**fields))] == [told]
    warnings = score_warnings(BEFORE, after(**fields))
    assert len(warnings) == is_of_scores
    assert all(
        "are not comparable; indicate that with a major version" in warning for warning in warnings
    )
    assert score_warnings(BEFORE, after("1.0.0", **fields)) == []
