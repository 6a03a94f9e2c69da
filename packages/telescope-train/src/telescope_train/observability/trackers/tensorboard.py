"""TensorBoard: event files in `tensorboard/` of the run folder, for `tensorboard --logdir runs`."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorboardX
from tensorboardX.proto.summary_pb2 import Summary

from telescope_core.records.rows import RolloutRow
from telescope_train.observability.trackers.tracker import TrackedRun

FOLDER = "tensorboard"
GAUGES = "gauges"
"""Subfolder for readings of meters, which TensorBoard shows as a run."""


class TensorBoard:
    """Writes event files; see `Tracker`."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._gauges: Any = None

    def begin(self, run: TrackedRun) -> None:
        """Open a file; repeated steps replace earlier ones."""
        self._writer = tensorboardX.SummaryWriter(
            logdir=str(run.folder / FOLDER), purge_step=run.first_step
        )
        # In a folder of their own, because their steps are seconds, of which none is taken again.
        self._gauges = tensorboardX.SummaryWriter(logdir=str(run.folder / FOLDER / GAUGES))

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        # As one record: a record for each number takes ten times as long, and the writer's own way
        # changes names such as `eval/math/pass@1`.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)
        self._writer.flush()

    def log_gauges(self, time_s: int, row: Mapping[str, float]) -> None:
        """Write readings of meters at their times; choose the axis `Wall` or `Relative`."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._gauges.file_writer.add_summary(Summary(value=values), time_s, walltime=time_s)
        self._gauges.flush()

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write rollouts as text that TensorBoard does not render as Markdown."""
        for number, row in enumerate(rows):
            text = "\n\n".join(f"{one.role}: {one.content}" for one in row.messages)
            shown = f"<pre>reward {row.reward}\n\n{html.escape(text)}</pre>"
            self._writer.add_text(f"rollouts/{row.environment}/{number}", shown, global_step=step)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Do nothing: the files of the run are beside those of TensorBoard."""

    def end(self, state: str) -> None:
        """Close the files."""
        self._writer.close()
        self._gauges.close()
