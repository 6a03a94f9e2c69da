"""Play many simulated runs in which things go wrong, and name those in which an invariant broke.

    python scripts/simulate_faults.py --schedules 1000
    python scripts/simulate_faults.py --kinds driver-killed several-at-once --schedules 200
    python scripts/simulate_faults.py --replay driver-killed/17

Exit code 0: every run kept every invariant; 1: some did not, and their names are printed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulation.schedules import KINDS, play, schedule

_SHOWN = 3


def found(name: str) -> tuple[str, list[str]]:
    """Play the schedule `kind/number`; returns its name and what was wrong."""
    kind, _, number = name.rpartition("/")
    try:
        return name, play(schedule(kind, int(number)))
    except Exception as error:  # noqa: BLE001 - a crash of any kind is what is looked for
        return name, [f"{type(error).__name__}: {error}"]


def main() -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=50, help="runs of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--workers", type=int, default=2, help="processes that play them")
    parser.add_argument("--replay", metavar="KIND/NUMBER", help="play one run and say what broke")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    names = [
        f"{kind}/{number}"
        for kind in options.kinds
        for number in range(options.first, options.first + options.schedules)
    ]
    if options.replay is not None:
        kind = options.replay.rpartition("/")[0]
        if kind not in KINDS or not options.replay.rpartition("/")[2].isdigit():
            parser.error(f"--replay: expected KIND/NUMBER with a kind of: {', '.join(KINDS)}")
        names = [options.replay]
    began_s = time.perf_counter()
    wrong: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(options.workers) as workers:
        for name, problems in workers.map(found, names, chunksize=8):
            kind = name.rpartition("/")[0]
            counts[kind] += 1
            if problems:
                wrong[name] = problems
            if sys.stderr.isatty() and sum(counts.values()) % 50 == 0:
                print(f"\r{sum(counts.values())} of {len(names)}", end="\r", file=sys.stderr)
            if counts[kind] == options.schedules and not options.json:
                # At once: what was found is known even if the rest is never played.
                broken = sum(one.rpartition("/")[0] == kind for one in wrong)
                print(f"{kind:<30} {counts[kind]:>6} played {broken:>6} wrong", flush=True)
    seconds = time.perf_counter() - began_s
    if options.json:
        print(json.dumps({"played": counts, "wrong": wrong, "seconds": round(seconds, 1)}))
        return int(bool(wrong))
    for name, problems in wrong.items():
        print(f"\n{name}: play it again with --replay {name}")
        print("\n".join(f"  {problem}" for problem in problems[:_SHOWN]))
    print(f"\n{len(names)} runs in {seconds:.0f} s, {len(wrong)} of them wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
