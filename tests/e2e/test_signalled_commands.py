"""Signals end `telescope export` and `telescope eval --model` anywhere between start and end."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from safetensors.torch import load_file
from tests.signals import heed_all_but

from telescope_core.base.file_proofs import wrong_sums
from telescope_core.evals import EvalFolder
from telescope_core.records import RunState

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from cli_runs import environment
from resume_run import config_of, run

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
TELESCOPE = [sys.executable, "-c", "from telescope_cli.main import main; main()"]
NUM_MOMENTS = 6
LIMIT_S = 300
SHORT = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Short(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=str(i), prompt=f"{i}+1=") for i in range(16)])

    @reward
    def said_something(self, rollout, example):
        return float(len(rollout.completion_text) > 0)
"""


class Ended(NamedTuple):
    """How a command ended that was sent a signal."""

    code: int
    words: str
    numbers: tuple[signal.Signals, ...]
    """Signals that it was sent; of two, a busy process may see the second one first."""
    left: list[str]
    """Processes of the command that outlived it."""


@contextmanager
def started(command: list[str], place: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*TELESCOPE, *command],
        cwd=place,
        env=environment({"PYTHONPATH": str(place)}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_all_but,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def seconds_of(command: list[str], place: Path) -> float:
    """Return how long a command takes that nothing disturbs."""
    began_s = time.monotonic()
    with started(command, place) as process:
        _, words = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, words
    return time.monotonic() - began_s


def signalled(command: list[str], place: Path, after_s: float, rng: random.Random) -> Ended:
    """Run a command and send it a signal: once, followed by another, or to its whole group."""
    numbers = (rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]),)
    with started(command, place) as process:
        until_s = time.monotonic() + after_s
        while time.monotonic() < until_s and process.poll() is None:
            time.sleep(0.01)
        children: list[psutil.Process] = []
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            how = rng.choice(["once", "twice", "group"])
            if how == "group":
                os.killpg(process.pid, numbers[0])
            else:
                process.send_signal(numbers[0])
            if how == "twice":
                time.sleep(rng.uniform(0.0, 0.5))
                process.send_signal(signal.SIGINT)
                numbers = (*numbers, signal.SIGINT)
        _, words = process.communicate(timeout=LIMIT_S)
    _, left = psutil.wait_procs(children, timeout=30)
    names = [f"{one.pid} {one.name()}" for one in left]
    for one in left:
        one.kill()
    return Ended(process.returncode, words, numbers, names)


def problems_of(ended: Ended) -> list[str]:
    """Return what is not as `docs/reference/exit-codes.md` says of any command."""
    code, words, numbers, left = ended
    found = [f"{one} is left" for one in left]
    if "Traceback" in words or "*** SIG" in words:
        found.append(f"stderr: {words[-1500:]}")
    # Before the command has begun to run, the system ends it, and nothing is written.
    if code not in (0, *(128 + one for one in numbers), *(-one for one in numbers)):
        found.append(f"exit code {code}: {words[-500:]}")
    if code > 128 and f"interrupted by {signal.Signals(code - 128).name}" not in words:
        found.append(f"no last words: {words[-500:]}")
    return found


def each_moment(
    command: Callable[[int], list[str]],
    place: Path,
    look: Callable[[int, Ended], list[str]],
    *,
    whole_s: float,
) -> list[str]:
    """Send a signal in each part of the life of a command; returns all problems, with the moment.

    The parts are of the time that it takes alone, and the last one may be after its end. `command`
    and `look`, which returns further problems, get the number of the part.
    """
    rng, found = random.Random(1), list[str]()
    for part in range(NUM_MOMENTS):
        after_s = whole_s * (part + rng.random()) / NUM_MOMENTS
        ended = signalled(command(part), place, after_s, rng)
        problems = problems_of(ended) + look(part, ended)
        sent = "+".join(one.name for one in ended.numbers)
        print(f"{sent} after {after_s:.2f} s: code {ended.code}, {problems}")
        found += [f"after {after_s:.2f} of {whole_s:.2f} s: {one}" for one in problems]
    return found


@pytest.mark.parametrize("replaces", [False, True])
def test_an_export_is_whole_or_absent(tiny_model: Path, tmp_path: Path, replaces: bool) -> None:
    trained = tmp_path / "run"
    flags = ("--number_of_steps", "1", "--warmup_steps", "1")
    asyncio.run(run(config_of(tmp_path, tiny_model, *flags)))
    # Hundreds of files: most of the time goes into what is written.
    command = ["export", str(trained), "--output", "out/model", "--max-shard-size", "2KB"]
    out = tmp_path / "out" / "model"
    whole_s = seconds_of(command, tmp_path)
    weights = whole_weights(out)

    def look(part: int, ended: Ended) -> list[str]:
        beside = {one.name for one in out.parent.iterdir()} - {out.name}
        found = [f"left beside it: {beside}"] if beside else []
        if out.exists():
            if wrong := wrong_sums(out):
                found.append(f"not whole: {wrong}")
            elif whole_weights(out) != weights:
                found.append("other weights")
        elif ended.code == 0 or replaces:
            found.append("no export")
        if out.exists() and not replaces:
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        return found

    if not replaces:
        look(0, Ended(0, "", (), []))
    assert each_moment(lambda part: command, tmp_path, look, whole_s=whole_s) == []


def whole_weights(folder: Path) -> dict[str, list[float]]:
    """Return the weights by name, as lists that can be compared."""
    return {
        name: value.flatten().tolist()
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def test_an_eval_of_a_model_ends_its_server_and_can_go_on(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "short_env.py").write_text(SHORT)
    command = ["eval", "short_env:Short", "--model", str(tiny_model), "--examples", "16"]
    command += ["--rollouts", "16", "--max-tokens", "64", "--concurrency", "8", "--seed", "1"]
    whole_s = seconds_of([*command, "--output", "whole"], tmp_path)
    expected = EvalFolder(tmp_path / "whole").result()
    assert expected is not None
    interrupted: list[int] = []

    def look(part: int, ended: Ended) -> list[str]:
        folder = EvalFolder(tmp_path / f"out-{part}")
        if not (folder.path / "eval.json").is_file():
            return [] if ended.code else ["no folder"]
        info, rows = folder.info(), folder.read()
        assert info is not None
        found = [f"unreadable: {rows.problems}"] if rows.problems else []
        if info.state is not (RunState.INTERRUPTED if ended.code else RunState.FINISHED):
            found.append(f"eval.json says {info.state}, {info.reason!r}, with code {ended.code}")
        if ended.code:
            interrupted.append(part)
            if "--resume" not in ended.words:
                found.append(f"it does not say how to go on: {ended.words[-500:]}")
        return found

    def begin(part: int) -> list[str]:
        return [*command, "--output", f"out-{part}"]

    assert each_moment(begin, tmp_path, look, whole_s=whole_s) == []
    last = interrupted[-1]
    seconds_of([*begin(last), "--resume"], tmp_path)
    result = EvalFolder(tmp_path / f"out-{last}").result()
    assert result is not None
    assert (result.num_scored, result.num_failed) == (expected.num_scored, 0)
