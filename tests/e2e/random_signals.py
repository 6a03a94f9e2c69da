"""A real run that signals end at random moments of its life, and what must hold after each.

    python tests/e2e/random_signals.py --place DIR --model MODEL --times 30 --seed 1

A run that was ended goes on with `--resume-if-saved`; one that has finished makes way for another.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import environment, train_command
from tests.ports import free_port

from telescope_core.records import RunFolder, RunState
from telescope_train.checkpoints.folders import complete_checkpoints

NUM_STEPS = 6
LIMIT_S = 400
RUN = f"""
[run]
name = "signalled"
number_of_steps = {NUM_STEPS}
[rollout]
discard_group_zero_advantage = false
[checkpoint]
checkpoint_every = 2
[evals]
eval_after_training = true
[[evals.evals]]
name = "math-reasoning"
env = {{ level = "digit", operations = "+", instruction = "" }}
num_samples = 16
eval_every = 2
pass_k = [1]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a signal is sent: up to `within_s` seconds after `has_come` is true."""

    name: str
    has_come: Callable[[Path], bool]
    within_s: float


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _has(pattern: str) -> Callable[[Path], bool]:
    return lambda run: any(run.glob(pattern))


def _says(text: str) -> Callable[[Path], bool]:
    def has_come(run: Path) -> bool:
        log = run / "logs" / "driver.jsonl"
        pid = RunFolder.open(run).info().pid
        told = log.read_text(errors="replace") if log.is_file() else ""
        return text in told.partition(f"process {pid} on")[2]

    return has_come


MOMENTS = [
    Moment(name="imports and checks", has_come=lambda run: True, within_s=12.0),
    Moment(name="Ray starts", has_come=_says("begins"), within_s=20.0),
    Moment(name="servers and ranks start", has_come=_says("starting inference"), within_s=6.0),
    Moment(name="first weights and self-tests", has_come=_says("trainer rank 0 runs"), within_s=15),
    Moment(name="steps", has_come=_says('"training"'), within_s=6.0),
    Moment(name="a checkpoint", has_come=_has("checkpoints/.step-*.partial"), within_s=0.5),
    Moment(name="an eval", has_come=_has("evals/*"), within_s=1.0),
    Moment(name="the last checkpoint", has_come=_has("checkpoints/.final.partial"), within_s=0.5),
    Moment(name="the end", has_come=_has("checkpoints/final"), within_s=4.0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one signal."""

    moment: str
    signals: str
    code: int
    state: str
    words: str
    ended_in_s: float
    problems: tuple[str, ...]


def signal_once(
    place: Path, model: Path, moment: Moment, rng: random.Random, number: signal.Signals
) -> Outcome:
    """Start or continue the run in `place`, send `number` at `moment`, and look at what is left."""
    run, temporary = place / "runs" / "signalled", place / "t"
    temporary.mkdir(exist_ok=True)
    command = train_command(place, model, RUN, port=free_port())
    started_at = time.time()
    with (place / "err").open("w") as errors, (place / "out").open("w") as output:
        process = subprocess.Popen(
            [*command, "--resume-if-saved"],
            cwd=place,
            env=environment({"TMPDIR": str(temporary)}),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    children = _until(moment, process, run, started_at, rng)
    sent_s = time.monotonic()
    how = _send(process, number, rng)
    problems: list[str] = []
    try:
        code = process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        problems.append("it did not end within 120 s")
        process.kill()
        code = process.wait()
    ended_in_s = time.monotonic() - sent_s
    _, left = psutil.wait_procs(children, timeout=20)
    for one in left:
        problems.append(f"{one.name()} is left")
        one.kill()
    words = (place / "err").read_text(errors="replace")
    if how == "twice" and code == 128 + signal.SIGINT:
        # Of signals that wait while a library computes, Python handles the lowest number first.
        number = signal.SIGINT
    problems += _problems(run, code, words, number, started_at, temporary)
    state = RunFolder.open(run).info().state if (run / "run.json").is_file() else "no run"
    return Outcome(
        moment=moment.name,
        signals=f"{number.name} {how}",
        code=code,
        state=str(state),
        words=words.strip().rpartition("\n")[2],
        ended_in_s=round(ended_in_s, 1),
        problems=tuple(problems),
    )


def _until(
    moment: Moment,
    process: subprocess.Popen[bytes],
    run: Path,
    started_at: float,
    rng: random.Random,
) -> list[psutil.Process]:
    """Wait for a random time after the moment; returns all that the process has started."""
    driver, give_up_s = psutil.Process(process.pid), time.monotonic() + LIMIT_S
    while process.poll() is None:
        # What an earlier try left does not count.
        is_this_try = _modified_at(run / "run.json") >= started_at
        if moment is MOMENTS[0] or (is_this_try and moment.has_come(run)):
            break
        assert time.monotonic() < give_up_s, f"{moment.name} did not come"
        time.sleep(0.01)
    until_s = time.monotonic() + rng.uniform(0.0, moment.within_s)
    while time.monotonic() < until_s and process.poll() is None:
        time.sleep(0.01)
    try:
        return driver.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _send(process: subprocess.Popen[bytes], number: signal.Signals, rng: random.Random) -> str:
    """Send the signal once, followed by another, or to the whole group, as a terminal does."""
    how = rng.choice(["once", "once", "twice", "group"])
    if process.poll() is not None:
        return "(it had ended before)"
    if how == "group":
        os.killpg(process.pid, number)
        return how
    process.send_signal(number)
    if how == "twice":
        time.sleep(rng.uniform(0.0, 1.5))
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    return how


def _problems(
    run: Path, code: int, words: str, number: signal.Signals, started_at: float, temporary: Path
) -> list[str]:
    """Return what is not as promised."""
    found: list[str] = []
    if "Traceback" in words or "*** SIG" in words:
        found.append(f"stderr: {words[-1500:]}")
    # Before the command has begun to run, the system ends it, and nothing is written.
    if code not in (0, 128 + number, -number):
        found.append(f"exit code {code}")
    if code == 128 + number and "stopping (" not in words:
        found.append("no word at once")
    if code == 128 + number and f"interrupted by {number.name}" not in words:
        found.append("no last words")
    if leftovers := [one.name for one in temporary.glob("telescope-*")]:
        found.append(f"left in the temporary folder: {leftovers}")
    if not (run / "run.json").is_file():
        return found
    info = RunFolder.open(run).info()
    if _modified_at(run / "run.json") >= started_at:
        expected = RunState.INTERRUPTED if code else RunState.FINISHED
        if info.state is not expected or info.ended_at is None:
            found.append(f"run.json: {info.state}, {info.reason!r}, {info.ended_at}")
        if code and number.name not in info.reason:
            found.append(f"reason {info.reason!r}")
    return found + _problems_of_records(RunFolder.open(run))


def _problems_of_records(folder: RunFolder) -> list[str]:
    found: list[str] = []
    steps = [row["step"] for row in folder.metrics()]
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"steps {steps}")
    if not set(steps) <= set(folder.rollout_steps()):
        found.append(f"rollouts of {folder.rollout_steps()}, metrics of {steps}")
    folder.rollouts()  # every file can be read
    saved = {one.path.name for one in complete_checkpoints(folder.checkpoints_path)}
    there = {one.name for one in folder.checkpoints_path.glob("*")}
    if there != saved:
        found.append(f"checkpoints/ holds {there}, of which {saved} are whole")
    return found


def outcomes(place: Path, model: Path, *, times: int, seed: int) -> list[Outcome]:
    """Return what came of `times` signals at random moments."""
    rng, found = random.Random(seed), list[Outcome]()
    place.mkdir(parents=True, exist_ok=True)
    run = place / "runs" / "signalled"
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(times)]
    rng.shuffle(moments)
    for moment in moments:
        if run.is_dir() and RunFolder.open(run).info().state is RunState.FINISHED:
            shutil.rmtree(run)
        number = rng.choice([signal.SIGTERM] * 3 + [signal.SIGINT, signal.SIGHUP])
        found.append(signal_once(place, model, moment, rng, number))
        print(json.dumps({field: getattr(found[-1], field) for field in Outcome.__slots__}))
        sys.stdout.flush()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    all_found = outcomes(
        given.place.absolute(), given.model.absolute(), times=given.times, seed=given.seed
    )
    sys.exit(any(one.problems for one in all_found))
