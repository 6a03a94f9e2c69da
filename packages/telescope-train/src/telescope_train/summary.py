"""The summary of a finished run, computed from its folder alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from telescope_core.base.errors import TelescopeError
from telescope_core.diagnosis import History, diagnose
from telescope_core.evals import Comparison, EvalResult, read_results
from telescope_core.records import RunFolder, RunState
from telescope_core.reports.before_after import from_first_to_last, trained_evals
from telescope_core.reports.differences import paragraph
from telescope_core.reports.overview import edge_means, reward_curve
from telescope_core.reports.verdict import run_verdict
from telescope_train.checkpoints.folders import FINAL, checkpoints_folder
from telescope_train.config.eval_folders import AFTER, BEFORE, eval_path, eval_steps, step_tag
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.step.losses import losses_of


def make_summary(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    rows = folder.metrics()
    rewards = [reward for reward in reward_curve(rows) if reward is not None]
    mismatches = [row["mismatch/max"] for row in rows if row.get("mismatch/max") is not None]
    trained, held_out = folder.trained_examples(), folder.held_out_examples()
    seconds = sum(row.get("time/step_s") or 0.0 for row in rows)
    return {
        "name": config.run.name,
        "run_folder": str(folder.path),
        "steps": len(rows),
        "verdict": run_verdict(folder, state=RunState.FINISHED).as_json(),
        **first_and_last(rewards),
        "rewards": rewards,
        "examples": {
            "trained": len(trained),
            "held_out": len(held_out),
            "in_both": len(trained & held_out),
            "trained_evals": trained_evals(folder.config(), folder.info().environments),
        },
        "losses": losses_of(folder, rows),
        "findings": [one.as_json() for one in diagnose(History.of_rows(rows))],
        "mismatch_max": max(mismatches, default=None),
        "seconds_training": seconds,
        "seconds_per_step": seconds / max(1, len(rows)),
        "evals": {entry.name: _eval_entry(config, folder, entry) for entry in config.evals.evals},
        "export": str(checkpoints_folder(config) / FINAL / "hf"),
        "report": str(folder.report_path),
    }


def require_disjoint(summary: Mapping[str, Any]) -> None:
    """Raise TelescopeError if a held-out example was trained on.

    Rollouts are checked for this before they are trained on, so it is a defect, and the evals of
    such a run must not be believed.
    """
    if num_both := summary["examples"]["in_both"]:
        raise TelescopeError(
            f"{num_both} examples of evals were trained on, though separate_eval_samples holds "
            f"them out, so the evals of {summary['run_folder']} say too much; please report this"
        )


def first_and_last(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean rewards of the first and of the last steps, and their difference."""
    first, last, num_steps = edge_means(values)
    return {
        "compared_steps": num_steps,
        "first_mean": first,
        "last_mean": last,
        "delta": None if first is None or last is None else last - first,
    }


def _eval_entry(config: TrainConfig, folder: RunFolder, entry: EvalEntry) -> dict[str, Any]:
    """Return the numbers of the first and the last eval, by their tags, and the change."""
    tags = [BEFORE, *map(step_tag, eval_steps(config, entry)), AFTER]
    ends = {**_first_result(folder, entry, tags), **_first_result(folder, entry, tags[::-1])}
    numbers = {tag: _eval_numbers(result) for tag, result in ends.items()}
    comparison = from_first_to_last(ends).comparison if ends else None
    return numbers if comparison is None else {**numbers, "change": _change_numbers(comparison)}


def _first_result(
    folder: RunFolder, entry: EvalEntry, tags: Sequence[str]
) -> dict[str, EvalResult]:
    """Return the tag of the first of these evals with a result that can be read; empty without."""
    for tag in tags:
        for result in read_results([eval_path(folder, entry, tag)]).results.values():
            return {tag: result}
    return {}


def _eval_numbers(result: EvalResult) -> dict[str, Any]:
    pass_1 = result.pass_at.get(1)
    return {
        "mean": pass_1.mean if pass_1 else None,
        "low": pass_1.low if pass_1 else None,
        "high": pass_1.high if pass_1 else None,
        "reward": result.reward.mean if result.reward else None,
        "num_tasks": result.num_tasks,
        "num_scored": result.num_scored,
        "num_failed": result.num_failed,
    }


def _change_numbers(comparison: Comparison) -> dict[str, Any]:
    """Return the paired difference of the main measure, and a sentence about it."""
    main = comparison.main
    return {**asdict(main), "mean": main.change, "text": paragraph(comparison)}
