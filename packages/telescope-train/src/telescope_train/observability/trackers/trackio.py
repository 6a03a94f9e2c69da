"""trackio: a project `telescope` in the user's own trackio folder, for `trackio show`.

`TRACKIO_DIR` is that folder. `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` send to a place elsewhere,
as trackio itself has it.
"""

import html
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from telescope_core.base.errors import ConfigError
from telescope_core.records.files import read_json, write_json
from telescope_core.records.rows import RolloutRow
from telescope_train.observability.trackers.logins import login_problem
from telescope_train.observability.trackers.tracker import TrackedRun

PROJECT = "telescope"
IDENTITY = "trackio.json"
"""File in the run folder with the name and the id of the run at trackio."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_LOGGER = logging.getLogger(__name__)
_SAMPLE_COLUMNS = ("environment", "group", "reward", "messages")


class Trackio:
    """Writes to trackio's database; see `Tracker`."""

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: TrackedRun) -> None:
        """Start a run there, or continue the one of this folder."""
        if problem := login_problem("trackio"):
            raise ConfigError(problem)
        _print_to_log()
        identity = run.folder / IDENTITY
        known = read_json(identity) or {}
        # The run's own meters come with its steps. trackio would read them once more.
        self._run = trackio.init(
            project=PROJECT,
            name=known.get("name", run.name),
            config=dict(run.config),
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # trackio resumes the newest run of a name, which may be that of another folder.
        self._run.id = known.get("id", self._run.id)
        write_json(identity, {"project": PROJECT, "name": self._run.name, "id": self._run.id})

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        # trackio has the step by itself, and would keep it as a metric `__step`, with a warning.
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=step)

    def log_gauges(self, time_s: int, row: Mapping[str, float]) -> None:
        """Write readings of meters, which trackio draws over time."""
        self._run.log_system(dict(row))

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write rollouts as a table that trackio does not render as Markdown."""
        data: list[list[Any]] = []
        for row in rows:
            text = "\n\n".join(f"{one.role}: {one.content}" for one in row.messages)
            group = f"{row.group_id}/{row.index}"
            data.append([row.environment, group, row.reward, html.escape(text)])
        table = trackio.Table(columns=list(_SAMPLE_COLUMNS), data=data)
        self._run.log({"rollouts": table}, step=step)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Do nothing: no setting sends files to trackio."""

    def end(self, state: str) -> None:
        """Write the rest."""
        self._run.finish()


def _print_to_log() -> None:
    """Make trackio's modules print into the log of this process, without colors.

    Not `redirect_stdout`, which would also take what the other threads of the run print.
    """

    def log(*values: object, **_: object) -> None:
        if text := _COLORS.sub("", " ".join(map(str, values))).strip():
            _LOGGER.info("%s", text)

    for name, module in list(sys.modules.items()):
        if name == "trackio" or name.startswith("trackio."):
            vars(module)["print"] = log
