"""A virtual environment of its own for an environment: time and disk space, first and second.

The peer makes the same one with copied files, as `python -m venv` and pip do. Both take packages
from a warm cache, without a network. Space is that of files no other place shares.
Run: python benchmarks/bench_environment_venv.py
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uv
from machine import facts_of_run, table, write_results

from telescope_envs import open_registry, resolve
from telescope_envs.registry.records import Release
from telescope_envs.venv import build_venv

COMMAND = "python benchmarks/bench_environment_venv.py"
REPEATS = 7
NOTE = """# Virtual environments of environments

`first` fills an empty place; `second` stands beside it. Times are the least of
several, for neighbours on the machine only add to them; on our side they hold the check that the
environment can be loaded (`of which loading`). `own bytes` are those of files
that are no hard links, and of folders. The first run of an environment writes byte code beside its
packages, which is not counted here on either side. Targets: a second one in under 1 s and 10 MB.

{facts}
"""


def own_megabytes(folder: Path) -> float:
    """Return the disk space of `folder` that nothing else shares, in MB."""
    total = 0
    for root, folders, files in os.walk(folder):
        paths = [os.path.join(root, name) for name in (*folders, *files)]
        stats = [os.lstat(path) for path in paths]
        total += sum(one.st_blocks * 512 for one in stats if one.st_nlink == 1 or not _is_file(one))
    return total / 1e6


def _is_file(stat: os.stat_result) -> bool:
    return stat.st_mode & 0o170000 == 0o100000


def loading_s(python: Path, release: Release) -> float:
    """Return how long it takes to import the environment there, interpreter start included."""
    code = "import sys; from telescope_core.open import load_environment_class as l; l(sys.argv[1])"
    began_s = time.perf_counter()
    subprocess.run([str(python), "-B", "-P", "-c", code, release.factory], check=True)
    return time.perf_counter() - began_s


def copied(release: Release, wheel: Path, like: Path, folder: Path) -> None:
    """The peer: the packages of the venv `like`, copied."""
    uv_bin = uv.find_uv_bin()
    listed = subprocess.run(
        [uv_bin, "pip", "freeze", "--python", str(like / "bin" / "python")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    needs = [pin for pin in listed if not pin.startswith(("telescope", "-e"))]
    subprocess.run([uv_bin, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    subprocess.run(
        [
            *(uv_bin, "pip", "install", "-q", "--offline", "--link-mode", "copy", "--no-deps"),
            *("--python", str(folder / "bin" / "python"), *[n for n in needs if "==" in n]),
            str(wheel),
        ],
        check=True,
    )


def used_cpu_s() -> float:
    """Return the CPU time of this process and of all it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(what: str, build: Callable[[Path], object], place: Path) -> dict[str, Any]:
    """Build `what` several times in new folders; returns times, and the space of the last."""
    times, cpu_times = [], []
    for number in range(REPEATS):
        folder = place / f"{what}-{number}".replace(" ", "-").replace("/", "-")
        began_s, cpu_s = time.perf_counter(), used_cpu_s()
        build(folder)
        times.append(time.perf_counter() - began_s)
        cpu_times.append(used_cpu_s() - cpu_s)
    row = {
        "what": what,
        "seconds": min(times),
        "median_seconds": statistics.median(times),
        "cpu_seconds": min(cpu_times),
        "own_mb": own_megabytes(folder),
    }
    print(row, flush=True)
    return {**row, "folder": str(folder)}


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "uv")
    registry = open_registry()
    rows = []
    with tempfile.TemporaryDirectory(dir=Path(sys.prefix) / "share") as scratch:
        place = Path(scratch)
        for order, name in (("first", "math-reasoning"), ("second", "countdown")):
            release = resolve(registry, name)
            wheel = place / release.wheel.filename
            wheel.write_bytes(registry.wheel_bytes(release))
            ours = measured(f"{order}, {name}", partial(build_venv, release, wheel), place)
            like = Path(ours.pop("folder"))
            ours["loading_s"] = loading_s(like / "bin" / "python", release)
            peer = measured(
                f"{order}, {name}, copied",
                partial(copied, release, wheel, like),
                place,
            )
            del peer["folder"]
            rows += [ours, peer]
    cells = [
        [
            row["what"],
            f"{row['seconds']:.2f}",
            f"{row['median_seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['loading_s']:.2f}" if "loading_s" in row else "-",
            f"{row['own_mb']:.1f}",
        ]
        for row in rows
    ]
    head = ("virtual environment", "seconds", "median", "CPU seconds", "of which loading", "own MB")
    write_results("environment_venv", f"{NOTE}\n{table(head, cells)}", facts, rows)


if __name__ == "__main__":
    main()
