"""Kill processes of a small run at random moments: seconds until the next step, and what was lost.

    python benchmarks/bench_faults.py --times 20
    python benchmarks/bench_faults.py --kinds rank driver --times 3 --seed 7

A real run on this machine's CPU: vLLM, Ray, an environment in a process of its own, two trainer
ranks, two servers. Exit code 1: a step or rollout was lost or is there twice, the records do not
tell of a kill, or the run did not go on within 60 seconds.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from faults.victim import KINDS, Place, Victim, examples_of, what_is_wrong
from machine import facts_of_run, table, write_results

from telescope_core.errors import ConfigError
from telescope_train.cluster.ports import free_port
from telescope_train.models.tiny import make_tiny_model

MOST_STEPS_BETWEEN = 10
TOLD_WITHIN = 30
"""Steps until the records tell of a kill; a dead server is noticed after a second or two."""
MOST_SECONDS = 60.0
"""Until one more step is done than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One process that was killed."""

    kind: str
    moment: str
    """What the run was doing."""
    step: int
    """Steps that were done."""
    repeated: int
    """Steps that were taken again."""
    seconds: float
    """Until one more step was done than before."""
    lost: str
    """What the records lack; empty = nothing."""
    is_told: bool
    """Whether the records say that the process died."""


def kill_one(victim: Victim, kind: str, chance: random.Random) -> Kill:
    """Kill a process of `kind` at a random moment, and wait until the run is further on."""
    goal = victim.num_steps + chance.randint(1, MOST_STEPS_BETWEEN)
    victim.until(lambda: victim.num_steps >= goal, f"step {goal}")
    # Anywhere in a step, whatever a step of this machine takes.
    time.sleep(chance.random() * 0.5)
    step, moment, num_told = victim.num_steps, victim.moment(), victim.num_told(kind)
    began_s = time.monotonic()
    kept = step
    if kind == "driver":
        victim.kill_driver()
        victim.resume()
        victim.until(lambda: victim.folder.info().observed_state == "running", "the run goes on")
        kept = victim.folder.info().resumes[-1].step
    else:
        victim.until(lambda: bool(victim.processes(kind)), f"a process of kind {kind}")
        chance.choice(victim.processes(kind)).kill()
    if kind == "rank":
        victim.until(lambda: victim.num_told(kind) > num_told, "ranks start again")
        restart = victim.folder.restarts()[-1]
        kept, step = restart.step, restart.reached
    victim.until(lambda: victim.num_steps > step, f"step {step + 1}")
    seconds = round(time.monotonic() - began_s, 1)
    return Kill(
        kind=kind,
        moment=moment,
        step=step,
        repeated=max(0, step - kept),
        seconds=seconds,
        lost="; ".join(lost_by(victim)),
        is_told=victim.is_told_within(TOLD_WITHIN, kind, num_told),
    )


def lost_by(victim: Victim) -> list[str]:
    """Return what the records lack; again if the run took files back while they were read."""
    try:
        return what_is_wrong(victim.folder)
    except ConfigError:
        step = victim.num_steps
        victim.until(lambda: victim.num_steps > step, f"step {step + 1}")
        return what_is_wrong(victim.folder)


def kill_many(
    place: Place, kinds: list[str], *, times: int, seed: int
) -> tuple[list[Kill], list[list[str]]]:
    """Kill processes of each kind `times` times in one run; returns its examples too."""
    chance = random.Random(seed)
    order = [kind for kind in kinds for _ in range(times)]
    chance.shuffle(order)
    victim = Victim(place)
    kills: list[Kill] = []
    try:
        victim.start()
        # A driver that dies before the first checkpoint leaves nothing to resume from.
        victim.until(lambda: victim.num_steps > 5, "the first checkpoint")
        for kind in order:
            kills.append(kill_one(victim, kind, chance))
            print(
                f"{kind:<12}{kills[-1].moment:<44}step {kills[-1].step:>4}"
                f"{kills[-1].seconds:>8.1f} s{kills[-1].repeated:>4} repeated  "
                f"{kills[-1].lost or 'nothing lost'}{'' if kills[-1].is_told else ', not told'}",
                flush=True,
            )
    finally:
        victim.close()
    return kills, examples_of(victim.folder)


def untouched(place: Place) -> list[list[str]]:
    """Return the examples of each step of a run in which nothing is killed."""
    victim = Victim(place)
    try:
        victim.start()
        victim.until(lambda: victim.num_steps >= place.num_steps, "the last step")
    finally:
        victim.close()
    return examples_of(victim.folder)


def summary(kills: list[Kill]) -> list[dict[str, Any]]:
    """Return the numbers of each kind."""
    rows: list[dict[str, Any]] = []
    for kind in sorted({one.kind for one in kills}):
        mine = [one for one in kills if one.kind == kind]
        seconds = [one.seconds for one in mine]
        rows.append(
            {
                "killed": kind,
                "times": len(mine),
                "median seconds to the next step": median(seconds),
                "most seconds": max(seconds),
                "most steps repeated": max(one.repeated for one in mine),
                "lost": sum(bool(one.lost) for one in mine),
                "not told by the records": sum(not one.is_told for one in mine),
            }
        )
    return rows


def main() -> int:
    """Kill what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--times", type=int, default=5, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=0, help="decides order and moments")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/faults.*")
    options = parser.parse_args()
    if options.times < 1:
        parser.error(f"--times: expected at least 1, got {options.times}")
    # Also when this is ended by a time limit: no process of the run may be left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="telescope-faults-") as folder:
        model = make_tiny_model(Path(folder) / "model", seed=1)
        place = Place(
            folder=Path(folder) / "a", model=model, port=free_port(), num_ranks=2, num_servers=2
        )
        kills, examples = kill_many(place, options.kinds, times=options.times, seed=options.seed)
        check = Place(
            folder=Path(folder) / "b",
            model=model,
            port=free_port(),
            num_ranks=2,
            num_servers=2,
            num_steps=len(examples),
        )
        is_same = untouched(check) == examples
    print(f"{len(examples)} steps; the examples of a run without kills: {is_same}")
    rows = summary(kills)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if options.save:
        facts = facts_of_run(
            f"python benchmarks/bench_faults.py --times {options.times} --seed {options.seed}",
            "torch",
            "ray",
        )
        head = list(rows[0])
        lines = [[str(row[name]) for name in head] for row in rows]
        page = f"# Processes that are killed\n\n{table(head, lines)}\n\n{{facts}}"
        write_results("faults", page, facts, [*rows, *(asdict(one) for one in kills)])
    is_well = all(not one.lost and one.is_told and one.seconds <= MOST_SECONDS for one in kills)
    return int(not (is_same and is_well))


if __name__ == "__main__":
    sys.exit(main())
