"""Which code an environment was: what counts as a change, and how it is said."""

from dataclasses import replace

import pytest

from telescope_core.base.environment_record import (
    EnvironmentRecord,
    all_changes,
    changes,
    record_of,
)
from telescope_core.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_core.records import RunFolder

ONE = EnvironmentRecord(
    id="acme/toy",
    version="0.1.0",
    place=EnvironmentPlace.ISOLATED,
    registry="somewhere",
    wheel_sha256="a" * 64,
    lock_digest="1" * 64,
    dependencies=("numpy==2.0", "six==1.16.0"),
)


@pytest.mark.parametrize(
    ("differs", "lines"),
    [
        ({}, []),
        ({"registry": "elsewhere"}, []),
        ({"place": EnvironmentPlace.SHARED, "lock_digest": ""}, ["place: isolated -> shared"]),
        ({"lock_digest": ""}, ["digest: 111111111111 -> none"]),
        (
            {"lock_digest": "2" * 64, "version": "0.2.0", "wheel_sha256": "b" * 64},
            ["version: 0.1.0 -> 0.2.0", "sha256: aaaaaaaaaaaa -> bbbbbbbbbbbb"],
        ),
        (
            {"lock_digest": "2" * 64, "dependencies": ("six==1.17.0",)},
            ["dependency numpy: 2.0 -> none", "dependency six: 1.16.0 -> 1.17.0"],
        ),
        ({"lock_digest": "2" * 64}, ["digest: 111111111111 -> 222222222222"]),
        (
            {"lock_digest": "", "wheel_sha256": "", "id": "other/toy", "registry": "elsewhere"},
            ["environment: acme/toy -> other/toy", "registry: somewhere -> elsewhere"],
        ),
        (
            {"lock_digest": "2" * 64, "registry": "elsewhere", "dependencies": ("six==1.17.0",)},
            ["dependency numpy: 2.0 -> none", "dependency six: 1.16.0 -> 1.17.0"],
        ),
    ],
)
def test_equal_digests_are_equal_code_and_all_else_is_named(differs, lines):
    assert changes(ONE, replace(ONE, **differs)) == lines


def test_only_what_both_runs_have_is_compared():
    other = replace(ONE, version="9", lock_digest="2" * 64)
    assert all_changes({"toy": ONE, "gone": ONE}, {"toy": other, "new": ONE}) == [
        "toy: version: 0.1.0 -> 9"
    ]


def test_a_run_folder_keeps_the_records(tmp_path):
    location = EnvironmentLocation(
        id="acme/toy",
        version="0.1.0",
        factory="toy:Toy",
        interpreter="python",
        place=EnvironmentPlace.ISOLATED,
        registry="somewhere",
        wheel_sha256="a" * 64,
        lock_digest="1" * 64,
        dependencies=("numpy==2.0", "six==1.16.0"),
    )
    assert record_of(location) == ONE
    run = RunFolder.create(tmp_path / "run", config={})
    run.note_environments({"toy": ONE})
    assert RunFolder.open(tmp_path / "run").info().environments == {"toy": ONE}
    assert ONE.text == "acme/toy 0.1.0 (isolated, digest 111111111111)"
