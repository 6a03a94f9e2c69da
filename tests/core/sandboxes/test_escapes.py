"""Every attack of `attacks.py` is stopped, whoever runs the sandboxes, with and without cgroups.

An attack is tried in as few kinds of sandboxes as have each user, means and beginning among them.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.core.sandboxes.attacks import ALONE, ONE_OPENED, TRY

import telescope_core
from telescope_core.sandboxes.local.interpreter import find_interpreter

pytestmark = pytest.mark.slow

ORDINARY = 61001
"""A user that no system has; root becomes it for half of the tests."""
ATTACKS = [*TRY, *ONE_OPENED, *ALONE]
KINDS = (
    [
        *(("root", "groups", "forked"), ("root", "groups", "started"), ("root", "watch", "forked")),
        *(("ordinary", "watch", "forked"), ("ordinary", "watch", "started")),
    ]
    if os.getuid() == 0
    else [("ordinary", "watch", "forked"), ("ordinary", "watch", "started")]
)
"""Who runs sandboxes, what holds their memory, and whether a template is forked for each."""
HELD_BY_MEANS = ("memory in one process", "memory in many processes", "daemon by double fork")
"""What the means are for; these are tried in every kind of sandbox."""
Kind = tuple[str, str, str]


def kinds_for(attack: str, num_of: dict[Kind, int]) -> list[Kind]:
    """Return the fewest kinds that have each user, means and beginning, the least used of them."""
    if attack in HELD_BY_MEANS:
        return KINDS
    values = set().union(*KINDS)
    for size in range(1, len(KINDS) + 1):
        found = [
            some for some in itertools.combinations(KINDS, size) if values <= set().union(*some)
        ]
        if found:
            return list(min(found, key=lambda some: sum(map(num_of.__getitem__, some))))
    raise AssertionError("all kinds together have all values")


def covering() -> list[tuple[str, Kind]]:
    """Return trials that hold each pair of an attack, a user, a means and a beginning there is."""
    trials: list[tuple[str, Kind]] = []
    num_of = dict.fromkeys(KINDS, 0)
    for attack in ATTACKS:
        for kind in kinds_for(attack, num_of):
            num_of[kind] += 1
            trials.append((attack, kind))
    return trials


TRIALS = covering()


@pytest.fixture(scope="module")
def readable() -> Iterator[Path]:
    """A folder with Telescope's core and the attacks that every user of this machine can read."""
    folder = Path(tempfile.mkdtemp(prefix="telescope-attacks-"))
    try:
        source = Path(telescope_core.__file__).parent
        shutil.copytree(
            source, folder / "telescope_core", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(Path(__file__).with_name("attacks.py"), folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
    finally:
        shutil.rmtree(folder)


def tried_as(who: str, readable: Path) -> dict[Kind, dict[str, Any]]:
    """Return what came of each attack that `who` tries, by kind; one process tries all of them."""
    python, drop = sys.executable, []
    if who == "ordinary" and os.getuid() == 0:
        python = find_interpreter().path
        drop = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]
    kinds = [kind for kind in KINDS if kind[0] == who]
    asked = [(*kind[1:], [attack for attack, one in TRIALS if one == kind]) for kind in kinds]
    done = subprocess.run(
        [*drop, python, "-B", "attacks.py"],
        input=json.dumps(asked),
        cwd=readable,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(readable)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    came = dict(zip(kinds, map(json.loads, done.stdout.splitlines()), strict=True))
    for (_, means, _), results in came.items():
        assert (results["uid"] == 0) == (who == "root")
        expected = "control group" if means == "groups" else "address space"
        assert results["measures"]["memory_mb"].startswith(expected), results["measures"]
    return came


@pytest.fixture(scope="module")
def came(readable: Path) -> dict[Kind, dict[str, Any]]:
    """What came of each attack in each kind of sandbox in which it is tried."""
    found = [tried_as(who, readable) for who in dict.fromkeys(who for who, _, _ in KINDS)]
    return {kind: results for one in found for kind, results in one.items()}


def test_every_pair_that_exists_is_tried():
    def pairs(trials):
        return {pair for a, kind in trials for pair in itertools.combinations((a, *kind), 2)}

    assert pairs(TRIALS) == pairs(itertools.product(ATTACKS, KINDS))


@pytest.mark.parametrize(
    ("attack", "kind"),
    [pytest.param(a, kind, id=f"{'-'.join(kind)}-{a}") for a, kind in TRIALS if a not in ALONE],
)
def test_an_attack_is_stopped(came, attack, kind):
    done = came[kind][attack]
    assert "ESCAPED" not in done["stdout"], done
    assert done["stdout"].startswith("stopped") or done["exit_code"] == 137, done


def kinds_of(attack: str) -> pytest.MarkDecorator:
    kinds = [pytest.param(kind, id="-".join(kind)) for a, kind in TRIALS if a == attack]
    return pytest.mark.parametrize("kind", kinds)


@kinds_of("memory in many processes")
def test_memory_that_many_processes_hold_together_is_limited(came, kind):
    done = came[kind]["memory in many processes"]
    assert done["stop"] == "memory", done
    assert done["stdout"].count("held") < 8, done


@kinds_of("ignored SIGTERM")
def test_a_program_that_ignores_every_signal_ends_at_its_time_limit(came, kind):
    done = came[kind]["ignored SIGTERM"]
    assert (done["stop"], done["stdout"]) == ("timeout", "on\n"), done


@kinds_of("kill of everything")
def test_a_program_cannot_end_its_supervisor(came, kind):
    done = came[kind]["kill of everything"]
    assert "ESCAPED" not in done["stdout"], done
    assert done["stop"] == "exited", done


@kinds_of("output flood")
def test_a_flood_of_output_is_counted_and_not_kept(came, kind):
    done = came[kind]["output flood"]
    assert done["stop"] == "timeout", done
    assert done["num_dropped_bytes"] > 1_000_000, done


@kinds_of("daemon by double fork")
def test_nothing_is_left_running(came, kind):
    """A daemon by a double fork among them."""
    assert came[kind]["daemon by double fork"]["stdout"] == "left\n"
    assert came[kind]["left"] == []
