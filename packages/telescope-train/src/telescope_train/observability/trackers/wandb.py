"""Weights & Biases: one W&B run for a run; after a resume, it continues with the same id.

`WANDB_MODE=offline` keeps everything in `wandb/` of the run folder, for `wandb sync` later.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from telescope_core.base.errors import ConfigError
from telescope_core.records.files import read_json, write_json
from telescope_core.records.rows import RolloutRow
from telescope_train.observability.trackers.logins import login_problem
from telescope_train.observability.trackers.tracker import TrackedRun

IDENTITY = "wandb.json"
"""File in the run folder with the id of the W&B run, and its last step."""
GAUGE_TIME = "gauge/time_s"
"""Axis of the meters: seconds since 1970, UTC."""
LOGS = "logs"
"""Folder of the logs in W&B."""
_SAMPLE_COLUMNS = ("environment", "group", "reward", "prompt", "answer")


class WeightsAndBiases:
    """Sends to W&B, or stores for it; see `Tracker`."""

    def __init__(self) -> None:
        self._run: Any = None
        self._identity = Path(IDENTITY)
        self._count = 0
        self._gauges = set[str]()

    def begin(self, run: TrackedRun) -> None:
        """Start a W&B run, or continue the one of this folder."""
        if problem := login_problem("wandb"):
            raise ConfigError(problem)
        # For the whole library, which still asks for a login if only the run is silent.
        wandb.setup(wandb.Settings(silent=True))
        self._identity = run.folder / IDENTITY
        known = read_json(self._identity) or {}
        options = run.options
        self._run = wandb.init(
            project=options["wandb_project"],
            name=run.name,
            tags=list(options["wandb_tags"]),
            id=known.get("id"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            # Its facts of the machine hold the command line, and the address of a git remote may
            # hold a token where a user's name is: either may be a secret. The commit is sent.
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True, git_remote=""),
        )
        # Offline, W&B does not know how far it had counted. Since that was written down, there was
        # at most one row of meters in a second. The clock may have been set back.
        since_s = max(0.0, time.time() - known.get("time_s", time.time()))
        self._count = max(self._run.step, known.get("count", -1) + int(since_s) + 1)
        self._remember()
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        # W&B's own count only grows, and drops what comes with a lower one. A step that is taken
        # again, or evaluated, is therefore counted on; curves are drawn over `step`.
        self._count = max(step, self._count + 1)
        self._run.log({**row, "step": step}, step=self._count)
        self._remember()

    def log_gauges(self, time_s: int, row: Mapping[str, float]) -> None:
        """Send readings of meters, over a time axis of their own."""
        # Named one by one, because a rule for `*` is there already.
        for name in row.keys() - self._gauges:
            self._run.define_metric(name, step_metric=GAUGE_TIME)
        self._gauges |= row.keys()
        self._count += 1
        self._run.log({**row, GAUGE_TIME: time_s}, step=self._count)

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Send rollouts as a table."""
        table = wandb.Table(columns=list(_SAMPLE_COLUMNS))
        for row in rows:
            said = [one.content for one in row.messages if one.role == "assistant"]
            others = [one for one in row.messages if one.role != "assistant"]
            asked = [f"{one.role}: {one.content}" for one in others]
            group = f"{row.group_id}/{row.index}"
            table.add_data(
                row.environment, group, row.reward, "\n\n".join(asked), "\n\n".join(said)
            )
        self._run.log({"rollouts": table, "step": step}, step=self._count)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Send files to `logs/` of the W&B run."""
        # In W&B's own folder, from which they can be sent later too.
        files = Path(self._run.dir)
        place = files / LOGS
        place.mkdir(parents=True, exist_ok=True)
        for path in paths:
            # Renamed when it is whole: what was there before may be on its way.
            partial = files / f"{path.name}.part"
            shutil.copy(path, partial)
            partial.replace(place / path.name)
        self._run.save(str(place / "*"), base_path=str(files), policy="now")

    def end(self, state: str) -> None:
        """Send the rest."""
        self._remember()
        self._run.finish(exit_code=0 if state == "finished" else 1)

    def _remember(self) -> None:
        known = {"id": self._run.id, "count": self._count, "time_s": time.time()}
        # A run folder that was moved away is not to be made anew.
        if self._identity.parent.is_dir():
            write_json(self._identity, known)
