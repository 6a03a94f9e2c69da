"""A small training run in processes of its own, which can be killed one by one and looked into."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.records.servers import ServerState
from telescope_train.checkpoints.folders import complete_checkpoints

TELESCOPE = (sys.executable, "-c", "from telescope_cli.main import main; main()")
NAME = "victim"
GROUPS, GROUP_SIZE = 4, 4
SETTINGS = """
[run]
name = "{name}"
number_of_steps = {steps}
[model]
model = {model}
[[environments]]
name = "math-reasoning"
env = {{ level = "digit", operations = "+", instruction = "" }}
[rollout]
group_size = {group_size}
prompts_batch_size_for_trainer = {groups}
max_tokens = 8
[trainer]
learning_rate = 1e-3
seq_len = 128
trainer_num_workers = {ranks}
[inference]
inference_base_port = {port}
inference_num_workers = {servers}
max_model_len = 64
[checkpoint]
checkpoint_every = 4
checkpoint_keep_last = 2
[ray]
worker_progress_timeout_s = 60
"""
MARKS: Mapping[str, str] = {
    "rank": "RankActor",
    "server": "telescope_train.inference.vllm_plugin.main",
    "environment": "telescope_core.processes.worker",
}
"""What the command lines of processes of a kind hold."""
KINDS = ("driver", *MARKS)
LINGERING = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""What Ray ends a minute after its raylet has died. Nobody waits for it, and it holds no port."""
DEADLINE_S = 240.0
_POLL_S = 0.02


class Stuck(Exception):
    """The run ended, or did not do in time what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run is, and what it needs."""

    folder: Path
    model: Path
    port: int
    num_steps: int = 100_000
    num_ranks: int = 1
    num_servers: int = 1

    @property
    def settings(self) -> str:
        """Return its settings in TOML."""
        return SETTINGS.format(
            name=NAME,
            steps=self.num_steps,
            model=json.dumps(str(self.model)),
            group_size=GROUP_SIZE,
            groups=GROUPS,
            ranks=self.num_ranks,
            servers=self.num_servers,
            port=self.port,
        )


class Victim:
    """One run; `start` begins or resumes it, and `close` ends all of its processes."""

    def __init__(self, place: Place) -> None:
        place.folder.mkdir(parents=True, exist_ok=True)
        (place.folder / "run.toml").write_text(place.settings)
        self.folder = RunFolder(place.folder / "runs" / NAME)
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[psutil.Process] = []
        self.output = place.folder / "output.txt"

    def start(self, *flags: str) -> None:
        """Start the command; returns at once."""
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*TELESCOPE, "train", "run.toml", *flags],
                cwd=self._place.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def num_steps(self) -> int:
        """Steps that are done."""
        return self.folder.last_step()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; raises Stuck with the end of the output if the run ends first."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            is_over = self._process is not None and self._process.poll() is not None
            if is_over or time.monotonic() > give_up_s:
                end = self.output.read_text(errors="replace")[-3000:]
                raise Stuck(f"the run {'ended' if is_over else 'hangs'} before {what}:\n{end}")
            time.sleep(_POLL_S)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind."""
        assert self._process is not None, "start comes first"
        driver = psutil.Process(self._process.pid)
        if kind == "driver":
            return [driver]
        found: list[psutil.Process] = []
        for child in driver.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if MARKS[kind] in " ".join(child.cmdline()):
                    found.append(child)
        # Of an environment, the process that plays, not the one that started it. The one that plays
        # may have started others, which score for it.
        parents: set[int] = set()
        for one in found if kind == "environment" else ():
            with suppress(psutil.NoSuchProcess):
                parents.add(one.ppid())
        return [one for one in found if one.pid not in parents]

    def moment(self) -> str:
        """Return what the run is doing, as far as files show it."""
        doing = "training or sampling"
        events = self.folder.server_events()
        if events and events[-1].state == "updating":
            doing = "updating weights"
        if any(self.folder.checkpoints_path.glob(".*.partial")):
            doing += ", writing a checkpoint"
        return doing

    def num_told(self, kind: str) -> float:
        """Return how many deaths of a kind of process the records tell of."""
        if kind == "driver":
            return len(self.folder.info().resumes)
        if kind == "rank":
            return len(self.folder.restarts())
        if kind == "server":
            states = [event.state for event in self.folder.server_events()]
            return states.count(ServerState.LOST)
        rows = list(self.folder.metrics())
        # It counts from the start of the driver on.
        return rows[-1].get("workers/math-reasoning/restarts", 0) if rows else 0

    def is_told_within(self, num_steps: int, kind: str, num_told: float) -> bool:
        """Whether the records tell of one more death of a kind at most `num_steps` steps later."""
        last = self.num_steps + num_steps
        self.until(
            lambda: self.num_told(kind) > num_told or self.num_steps >= last, "the records tell"
        )
        return self.num_told(kind) > num_told

    def kill_driver(self) -> None:
        """Kill the driver; returns once every process that the run needs again has ended."""
        assert self._process is not None, "start comes first"
        everything = psutil.Process(self._process.pid).children(recursive=True)
        children = [one for one in everything if not _lingers(one)]
        self._process.kill()
        self._process.wait()
        _, left = psutil.wait_procs(children, timeout=DEADLINE_S)
        if left:
            raise Stuck(f"processes outlive the driver: {left}")

    def resume(self) -> None:
        """Start the command again, from its newest checkpoint if there is one."""
        if complete_checkpoints(self.folder.checkpoints_path):
            self.start("--resume_from_checkpoint", "latest")
            return
        raise ConfigError(f"{self.folder.path} holds no checkpoint to resume from")

    def close(self) -> None:
        """End the run as Ctrl-C does, and what is left of it with force."""
        if self._process is None:
            return
        children = list[psutil.Process]()
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _, left = psutil.wait_procs(children, timeout=30)
        for one in left:
            one.kill()


def _lingers(process: psutil.Process) -> bool:
    try:
        return any(mark in " ".join(process.cmdline()) for mark in LINGERING)
    except psutil.NoSuchProcess:
        return False


def what_is_wrong(folder: RunFolder) -> list[str]:
    """Return where the records of a run show a step or rollout that is missing or there twice."""
    problems: list[str] = []
    steps = [row["step"] for row in folder.metrics()]
    if steps != list(range(1, len(steps) + 1)):
        problems.append(f"expected one row of metrics for each step, got the steps {steps}")
    seen: Counter[tuple[str, int]] = Counter()
    # A step whose rollouts are written may lack its metrics, when the driver was killed in it.
    for step in [one for one in folder.rollout_steps() if one <= len(steps)]:
        rows = folder.rollouts([step], with_tokens=False)
        seen.update((row.group_id, row.index) for row in rows)
        wrong = {row.group_id for row in rows if int(row.group_id.partition(".")[0]) != step - 1}
        if wrong:
            problems.append(f"step {step} holds groups of other steps: {sorted(wrong)}")
        if len(rows) != GROUPS * GROUP_SIZE:
            problems.append(f"step {step} holds {len(rows)} rollouts, not {GROUPS * GROUP_SIZE}")
        if any(row.reward is None for row in rows):
            problems.append(f"step {step} holds rollouts without a reward")
    if twice := [key for key, count in seen.items() if count > 1]:
        problems.append(f"rollouts are there twice: {sorted(twice)[:4]}")
    return problems


def examples_of(folder: RunFolder) -> list[list[str]]:
    """Return the ids of the examples of each step, by group."""
    return [
        [row.example_id for row in folder.rollouts([step], with_tokens=False) if row.index == 0]
        for step in folder.rollout_steps()
    ]
