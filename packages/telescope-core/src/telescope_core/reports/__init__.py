"""Reports of runs and evals, as text, SVG and self-contained HTML pages."""

from telescope_core.reports.eval_report import write_eval_report
from telescope_core.reports.overview import RunOverview, overview_of
from telescope_core.reports.sparkline import sparkline
from telescope_core.reports.train_report import write_train_report

__all__ = [
    "RunOverview",
    "overview_of",
    "sparkline",
    "write_eval_report",
    "write_train_report",
]
