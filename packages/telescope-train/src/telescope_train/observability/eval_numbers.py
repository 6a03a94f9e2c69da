"""The numbers of a step, and of an eval, for curves."""

from collections.abc import Mapping
from typing import Any

from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import Estimate
from telescope_core.records.eval_points import EvalPoint


def eval_numbers(point: EvalPoint, result: EvalResult) -> dict[str, float]:
    """Return rewards, pass@k and maj@k with their 95% intervals, and counts, by name.

    Unknown values, such as an interval of one task, are left out.
    """
    estimates: dict[str, Estimate | None] = {"reward": result.reward}
    estimates |= {f"pass@{k}": estimate for k, estimate in sorted(result.pass_at.items())}
    estimates |= {f"maj@{k}": estimate for k, estimate in sorted(result.majority_at.items())}
    numbers: dict[str, float | None] = {
        "version": float(point.version),
        "lag_steps": float(point.lag_steps),
        "scored": float(result.num_scored),
        "failed": float(result.num_failed),
    }
    for name, estimate in estimates.items():
        if estimate is not None:
            numbers[name] = estimate.mean
            numbers[f"{name}/low"], numbers[f"{name}/high"] = estimate.low, estimate.high
    return {name: value for name, value in numbers.items() if value is not None}


def step_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return those of the metrics of a step that are numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
