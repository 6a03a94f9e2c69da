"""Run folders: write the records of a run and read them back."""

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.records.identity import Resume, RunInfo, RunState
from telescope_core.records.rows import RolloutRow, row_of
from telescope_core.records.run_folder import RunFolder

__all__ = [
    "EnvironmentRecord",
    "Resume",
    "RolloutRow",
    "RunFolder",
    "RunInfo",
    "RunState",
    "row_of",
]
