"""`/compare`: evals of several runs side by side, the settings that differ, and curves."""

from collections.abc import Sequence
from dataclasses import asdict

from telescope_core.base.errors import ConfigError
from telescope_core.evals.comparison import compare_results
from telescope_core.evals.result import EvalResult
from telescope_core.reports.before_after import before_and_after
from telescope_core.reports.differences import cautions, sentence
from telescope_core.settings.differing import differing
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.parameters import CompareParameters
from telescope_ui.index.one_run import OneRun, seconds_of
from telescope_ui.pages.rewards import environment_courses, reward_course
from telescope_ui.pages.sections import chosen_metrics, curves_of, distinct, sections_of, usual
from telescope_ui.pages.verdicts import eval_results, judged

_INDEX_WAIT_S = 0.1
"""Wait for the index, in seconds: only intervals of rewards need it."""


def compare_page(runs: Sequence[OneRun], asked: CompareParameters) -> JsonObject:
    """Return the evals, settings and curves of `runs`."""
    names = {run.key: run.metrics.names() for run in runs}
    known = sorted({name for own in names.values() for name in own})
    chosen = chosen_metrics(known, asked)
    curves: dict[str, list[JsonObject]] = {name: [] for name in chosen}
    usual_of = {run.key: distinct(run, usual(names[run.key])) for run in runs}
    for run in runs:
        run.index.refresh(_INDEX_WAIT_S)
        own = [name for name in chosen if name in names[run.key]]
        found = curves_of(run, asked.model_copy(update={"metric": own, "section": []}))["curves"]
        for name in own:
            shared = {one: found[one] for one in ("steps", "times_s", "smooth_steps", "is_thinned")}
            smooth = found["smooth"].get(name, [])
            one = {"run": run.key, **shared, "values": found["metrics"][name], "smooth": smooth}
            curves[name].append(one)
    settings, num_equal = differing(
        {run.key: run.config() for run in runs},
        {run.key: run.settings_origin().defaults for run in runs},
    )
    return {
        "page": "compare",
        "runs": [
            {
                **run.brief(),
                "step": run.metrics.last_step(),
                "verdict": judged(run).verdict.as_json(),
                "started_s": seconds_of(run.info().started_at),
            }
            for run in runs
        ],
        "evals": _evals(runs),
        "settings": [
            {"name": one.name, "values": one.values, "is_place": one.is_place} for one in settings
        ],
        "num_equal_settings": num_equal,
        "rewards": _rewards(runs, asked),
        "metric_names": known,
        "sections": [{"name": key, "metrics": own} for key, own in sections_of(known).items()],
        "usual": [name for name in usual(known) if any(name in usual_of[run.key] for run in runs)],
        "curves": curves,
    }


def _rewards(runs: Sequence[OneRun], asked: CompareParameters) -> list[JsonObject]:
    """Return the reward of all environments, and that of each, in all runs that have it."""
    found: dict[str | None, list[JsonObject]] = {}
    for run in runs:
        courses = [reward_course(run, asked.drawn), *environment_courses(run, asked.drawn)]
        for course in courses:
            found.setdefault(course["environment"], []).append({"run": run.key, **course})
    return [{"environment": name, "runs": courses} for name, courses in found.items()]


def _evals(runs: Sequence[OneRun]) -> list[JsonObject]:
    """Return the last eval of each run by environment, compared with that of the first run."""
    last: dict[str, dict[str, EvalResult]] = {}
    moments: dict[tuple[str, str], str] = {}
    for run in runs:
        for one in before_and_after(eval_results(run)):
            last.setdefault(one.name, {})[run.key] = one.moments[-1].result
            moments[one.name, run.key] = one.moments[-1].label
    found: list[JsonObject] = []
    for name, results in sorted(last.items()):
        against = next(iter(results))
        found.append(
            {
                "environment": name,
                "against": against,
                "runs": [
                    {
                        **{"run": key, "moment": moments[name, key]},
                        **_estimate(result),
                        **(_versus(results[against], result) if key != against else {}),
                    }
                    for key, result in results.items()
                ],
            }
        )
    return found


def _estimate(result: EvalResult) -> JsonObject:
    """Return the measure with the smallest k, or else the reward."""
    k = min(result.pass_at, default=None)
    estimate = result.reward if k is None else result.pass_at[k]
    numbers: JsonObject = dict.fromkeys(("mean", "low", "high", "num_tasks"))
    numbers |= {} if estimate is None else asdict(estimate)
    return {"measure": "reward" if k is None else f"pass@{k}", **numbers, "versus": None}


def _versus(first: EvalResult, other: EvalResult) -> JsonObject:
    try:
        comparison = compare_results(first, other)
    except ConfigError:
        # The two have no example in common, so that there is nothing to say.
        return {}
    one = comparison.main
    numbers = {**asdict(one), "change": one.change, "is_shown": one.is_shown}
    return {"versus": {**numbers, "sentence": sentence(one), "cautions": cautions(comparison)}}
