"""The verdict on a run, and its problems, computed from its folder.

So runs of earlier versions, and runs that were killed, have both.
"""

from typing import NamedTuple

from telescope_core.diagnosis import Finding, History, diagnose
from telescope_core.evals.result import EvalResult
from telescope_core.reports.before_after import before_and_after, trained_evals
from telescope_core.reports.verdict import RunVerdict, seconds_left, verdict_of
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.eval_files import EvalPlace, eval_keys, problem_of, result_of
from telescope_ui.index.one_run import OneRun, settings_of


class Judged(NamedTuple):
    """The summary at the top of a run's page."""

    verdict: RunVerdict
    findings: list[Finding]
    left_s: float | None
    """Seconds until its last step; None if it has ended, or if that is not known."""

    def findings_as_json(self, run: OneRun) -> list[JsonObject]:
        """Return the findings, with only those of their metrics that the run has."""
        names = set(run.metrics.names())
        return [
            one.as_json() | {"metrics": [name for name in one.metrics if name in names]}
            for one in self.findings
        ]


def judged(run: OneRun) -> Judged:
    """Return the verdict on a run, and the findings of `telescope doctor`."""
    columns = run.metrics.columns(run.metrics.names())
    history = History(columns.steps, columns.values)
    findings = diagnose(history)
    state = run.info().observed_state
    total = settings_of(run)["number_of_steps"]
    num_steps = total if isinstance(total, int) else None
    trained = trained_evals(run.config(), run.info().environments)
    changes = before_and_after(eval_results(run), trained)
    return Judged(
        verdict_of(
            history,
            findings,
            changes,
            state=state,
            num_steps=num_steps,
            unreadable=list(eval_problems(run)),
            reward_ranges=run.info().reward_ranges,
        ),
        findings,
        seconds_left(history, num_steps) if state == "running" else None,
    )


def eval_results(run: OneRun) -> dict[str, EvalResult]:
    """Return the results of the evals of a run, by their folders, in the order of the weights."""
    found = {folder: result_of(EvalPlace(run.path, folder)) for folder in eval_keys(run.path)}
    return {folder: result for folder, result in found.items() if result is not None}


def eval_problems(run: OneRun) -> dict[str, str]:
    """Return why results of evals of a run cannot be read, by their folders."""
    found = {folder: problem_of(EvalPlace(run.path, folder)) for folder in eval_keys(run.path)}
    return {folder: problem for folder, problem in found.items() if problem}
