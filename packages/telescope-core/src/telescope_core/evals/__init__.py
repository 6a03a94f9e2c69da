"""Evals: play an environment's held-out examples and estimate scores with intervals."""

from telescope_core.evals.comparison import Comparison, Difference, compare_results
from telescope_core.evals.folder import EvalFolder, read_result, read_results, write_result
from telescope_core.evals.result import EvalResult, TaskScore
from telescope_core.evals.runner import EvalStoppedError, run_eval
from telescope_core.evals.settings import EvalSettings
from telescope_core.evals.stats import Estimate, pass_all_k, pass_at_k

__all__ = [
    "Comparison",
    "Difference",
    "Estimate",
    "EvalFolder",
    "EvalResult",
    "EvalSettings",
    "EvalStoppedError",
    "TaskScore",
    "compare_results",
    "pass_all_k",
    "pass_at_k",
    "read_result",
    "read_results",
    "run_eval",
    "write_result",
]
