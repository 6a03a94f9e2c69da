"""Kinds of faults in which checkpoints are being written when something goes wrong."""

import errno
import os
import random
from collections.abc import Callable, Mapping

from tests.simulation.disk import DiskTimes
from tests.simulation.plan import FaultPlan, after

from telescope_train.simulation.run import SimulatedRun

_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _saves(plan: FaultPlan, chance: random.Random) -> None:
    """Let checkpoints be rare and slow, or often and quick, with all that may be set."""
    every = chance.randint(1, 3)
    plan.checkpoint = {
        "checkpoint_every": every,
        "checkpoint_keep_last": chance.choice([None, 1, 1, 2]),
    }
    if plan.checkpoint["checkpoint_keep_last"] and chance.random() < 0.3:
        plan.checkpoint["checkpoint_keep_every"] = 2 * every
    plan.disk = DiskTimes(
        copy_s=chance.choice([0.0, chance.uniform(0, 5)]),
        write_s=chance.choice([0.0, chance.uniform(0, 5), chance.uniform(10, 90)]),
        file_s=chance.choice([0.0, chance.uniform(0, 2), chance.uniform(2, 30)]),
    )
    # No rollout fails because the steps before it were taken again.
    plan.rollout["rollout_timeout_s"] = 1_000_000.0
    plan.is_exact = True


def _writes_fail(plan: FaultPlan, chance: random.Random) -> None:
    """A full disk or a broken one; somebody makes room and resumes the run, which has ended."""
    _saves(plan, chance)
    _fail_sometimes(plan, chance)


def _driver_is_killed_while_saving(plan: FaultPlan, chance: random.Random) -> None:
    _saves(plan, chance)
    _while_saving(plan, chance, lambda run: run.killed.set)


def _ranks_die_while_saving(plan: FaultPlan, chance: random.Random) -> None:
    _saves(plan, chance)
    _while_saving(plan, chance, lambda run: run.ranks.die)


def _everything_while_saving(plan: FaultPlan, chance: random.Random) -> None:
    _saves(plan, chance)
    _fail_sometimes(plan, chance)
    _while_saving(plan, chance, lambda run: run.killed.set)
    _while_saving(plan, chance, lambda run: run.ranks.die)


def _fail_sometimes(plan: FaultPlan, chance: random.Random) -> None:
    share, num_left = chance.choice([0.03, 0.2]), chance.randint(1, 4)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        def failure() -> OSError | None:
            nonlocal num_left
            if not num_left or chance.random() >= share:
                return None
            num_left -= 1
            code = chance.choice(_ERRORS)
            return OSError(code, os.strerror(code))

        run.ranks.disk.failure = failure

    plan.also(disturb)


def _while_saving(
    plan: FaultPlan, chance: random.Random, death: Callable[[SimulatedRun], Callable[[], None]]
) -> None:
    """Let something die in the middle of some of the things that are written, or just after."""
    share, num_left = chance.choice([0.05, 0.3]), chance.randint(1, 4)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        told = run.ranks.disk.on_write

        def on_write(seconds: float) -> None:
            nonlocal num_left
            told(seconds)
            if num_left and chance.random() < share:
                num_left -= 1
                after(chance.uniform(0, 1.2 * seconds), death(run))

        run.ranks.disk.on_write = on_write

    plan.also(disturb)


CHECKPOINT_FAULTS: Mapping[str, Callable[[FaultPlan, random.Random], None]] = {
    "checkpoints-fail": _writes_fail,
    "driver-killed-while-saving": _driver_is_killed_while_saving,
    "ranks-die-while-saving": _ranks_die_while_saving,
    "several-while-saving": _everything_while_saving,
}
"""Name -> what a kind of fault changes."""
