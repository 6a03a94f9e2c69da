"""Installing a second environment with warm caches: ours, uv alone, and pip.

Ours is the whole command: registry, hashes, inspection, locking dependencies with hashes against
the package index, a virtual environment, trying it, telescope.lock. The peers do the one step in
the middle: make a virtual environment and install the same packages and the same wheel by name.
Space is that of files no other place shares.
Run: python benchmarks/bench_install.py
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uv
from machine import facts_of_run, table, write_results

from telescope_envs.install.requirements import direct_needs
from telescope_envs.processes.uv import index_settings
from telescope_envs.records.lockfile import read_lock
from telescope_envs.registry import open_registry, resolve

COMMAND = "python benchmarks/bench_install.py"
REPEATS = 5
PIP_REPEATS = 2
FIRST, SECOND = "math-reasoning", "countdown"
NOTE = """# Installing a second environment

`{second}`, where `{first}` is installed already and caches are warm. `ours` is
`telescope env install`, from the start of the command to its end; `ours, from the lock` is
`telescope env sync --locked`, and `ours, first` is `{first}` before it. The peers make a virtual
environment and install the same packages by name, with neither hashes nor a lock; they leave out
telescope-core, which ours copies. Ratios are to ours, by the least of several runs. `own MB` is the
space that nothing else shares. Target: ours under 2 s.

{facts}
"""


def own_megabytes(folder: Path) -> float:
    """Return the disk space of `folder` that nothing else shares, in MB."""
    total = 0
    for root, folders, files in os.walk(folder):
        stats = [os.lstat(os.path.join(root, name)) for name in (*folders, *files)]
        alone = [one for one in stats if one.st_nlink == 1 or one.st_mode & 0o170000 != 0o100000]
        total += sum(one.st_blocks * 512 for one in alone)
    return total / 1e6


def run(*command: str | Path, home: Path) -> None:
    """Run a command in `home`, whose data folder it uses; its output only when it fails."""
    environ = {**os.environ, **index_settings(os.environ), "TELESCOPE_HOME": str(home / "data")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=home,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")


def telescope(*arguments: str, home: Path) -> None:
    """Run `telescope env` there."""
    program = "from telescope_cli.main import main; main()"
    run(sys.executable, "-c", program, "env", *arguments, home=home)


def timed(work: Callable[[], None]) -> float:
    """Return how long `work` takes, in seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def ours(place: Path) -> dict[str, float]:
    """Install both into a new data folder, then the second from its lock into another."""
    first_s = timed(lambda: telescope("install", FIRST, home=place))
    second_s = timed(lambda: telescope("install", SECOND, home=place))
    (venv,) = (place / "data" / "venvs").glob(f"*{SECOND}*")
    space_mb = own_megabytes(venv)
    telescope("uninstall", FIRST, home=place)
    (place / "data").rename(place / "before")
    sync_s = timed(lambda: telescope("sync", "--locked", home=place))
    return {"first": first_s, "second": second_s, "sync": sync_s, "own_mb": space_mb}


def peer_uv(place: Path, needs: list[str], wheel: Path) -> tuple[float, float]:
    """Return seconds and megabytes of uv alone."""
    venv, tool = place / "uv", uv.find_uv_bin()

    def work() -> None:
        run(tool, "venv", "-q", "--no-project", "--python", sys.executable, venv, home=place)
        install = (tool, "pip", "install", "-q", "--python", venv / "bin" / "python")
        run(*install, "--link-mode", "copy", *needs, home=place)
        run(*install, "--no-deps", wheel, home=place)

    seconds = timed(work)
    return seconds, own_megabytes(venv)


def peer_pip(place: Path, needs: list[str], wheel: Path) -> tuple[float, float]:
    """Return seconds and megabytes of venv and pip."""
    venv = place / "pip"

    def work() -> None:
        run(sys.executable, "-m", "venv", venv, home=place)
        install = (venv / "bin" / "python", "-m", "pip", "install", "-q")
        run(*install, *needs, home=place)
        run(*install, "--no-deps", wheel, home=place)

    seconds = timed(work)
    return seconds, own_megabytes(venv)


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "uv")
    registry = open_registry()
    release = resolve(registry, SECOND)
    needs = direct_needs(release.requires_dist)
    runs: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("ours, first", "ours", "ours, from the lock", "uv", "pip")
    }
    for number in range(REPEATS):
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            wheel = place / release.wheel.filename
            wheel.write_bytes(registry.wheel_bytes(release))
            found = ours(place)
            runs["ours, first"].append((found["first"], 0.0))
            runs["ours"].append((found["second"], found["own_mb"]))
            runs["ours, from the lock"].append((found["sync"], found["own_mb"]))
            runs["uv"].append(peer_uv(place, needs, wheel))
            if number < PIP_REPEATS:
                runs["pip"].append(peer_pip(place, needs, wheel))
            assert read_lock(place / "telescope.lock").find(release.id) is not None
        print({name: measured[-1] for name, measured in runs.items()}, flush=True)
    rows = [row(name, measured, min(s for s, _ in runs["ours"])) for name, measured in runs.items()]
    cells = [
        [
            str(one["what"]),
            f"{one['seconds']:.2f}",
            f"{one['median_seconds']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['own_mb']:.1f}" if one["own_mb"] else "-",
        ]
        for one in rows
    ]
    head = ("installation", "seconds", "median", "ratio to ours", "own MB")
    note = NOTE.replace("{first}", FIRST).replace("{second}", SECOND)
    write_results("install", f"{note}\n{table(head, cells)}", facts, rows)


def row(name: str, measured: list[tuple[float, float]], ours_s: float) -> dict[str, Any]:
    """Return what the table and the file say of one way to install."""
    seconds = [one for one, _ in measured]
    return {
        "what": name,
        "seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "ratio": min(seconds) / ours_s,
        "own_mb": measured[-1][1],
    }


if __name__ == "__main__":
    main()
