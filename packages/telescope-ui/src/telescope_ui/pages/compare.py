"""Runs side by side: `/compare`, examples of theirs, and two rollouts in `/difference`."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from telescope_core.evals.result import EvalResult
from telescope_core.reports.before_after import before_and_after
from telescope_core.reports.differences import cautions
from telescope_core.settings.differing import differing, nobody_set
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.parameters import (
    CompareExamplesParameters,
    CompareParameters,
    DifferenceParameters,
)
from telescope_ui.files.database import Database
from telescope_ui.files.eval_files import main_estimate
from telescope_ui.index import queries
from telescope_ui.index.one_run import OneRun, escaped_part, seconds_of
from telescope_ui.index.runs import Runs
from telescope_ui.pages.evals import compared_or_none, verdict
from telescope_ui.pages.judged import eval_results, judged
from telescope_ui.pages.rewards import environment_courses, reward_course
from telescope_ui.pages.rollout import key_of, messages_json, row_at, scalars
from telescope_ui.pages.sections import chosen_metrics, curves_of, distinct, sections_of, usual

_INDEX_WAIT_S = 0.1
"""Wait for the index, in seconds: only intervals of rewards need it."""
_OF_EXAMPLE = ("count", "mean", "group_id", "index", "attempt")


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
    origins = {run.key: run.settings_origin() for run in runs}
    settings, num_equal = differing(
        {run.key: run.config() for run in runs},
        {key: origin.defaults for key, origin in origins.items()},
    )
    given = [origin.given for origin in origins.values()]
    set_by_someone = None if None in given else {name for one in given for name in one or ()}
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
            {
                "name": one.name,
                "values": one.values,
                "is_place": one.is_place,
                "follows": not one.is_place
                and set_by_someone is not None
                and nobody_set(one.name, set_by_someone),
            }
            for one in settings
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
                        **dict.fromkeys(("mean", "low", "high", "num_tasks")),
                        **main_estimate(result),
                        "versus": _versus(results[against], result) if key != against else None,
                    }
                    for key, result in results.items()
                ],
            }
        )
    return found


def _versus(first: EvalResult, other: EvalResult) -> JsonObject | None:
    compared = compared_or_none(first, other)
    if compared is None:
        return None
    return {**verdict(compared.main), "cautions": cautions(compared)}


def compare_examples_page(
    runs: Sequence[OneRun], database: Database, asked: CompareExamplesParameters
) -> JsonObject:
    """Return the examples that all of `runs` have, those with the largest difference first."""
    states = [run.index.refresh() for run in runs]
    found = {run.key: run for run in runs}
    rows = _example_rows(runs, database, asked) if len(found) > 1 else []
    return {
        "page": "compare_examples",
        "runs": [run.brief() for run in runs],
        "examples": [_example(runs, row) for row in rows],
        "index": {
            "files_done": sum(state["files_done"] for state in states),
            "files_total": sum(state["files_total"] for state in states),
            "is_complete": all(state["is_complete"] for state in states),
            "problems": [problem for state in states for problem in state["problems"]],
        },
    }


def _example_rows(
    runs: Sequence[OneRun], database: Database, asked: CompareExamplesParameters
) -> list[tuple[Any, ...]]:
    tables: list[str] = []
    for at, run in enumerate(runs):
        newest = ", ".join(
            f'arg_max("{name}", step) AS "{name}"' for name in ("group_id", "index", "attempt")
        )
        tables.append(
            f"(SELECT environment, example_id, count(reward) AS count, avg(reward) AS mean, "
            f"{newest} FROM {run.index.schema}.rollouts WHERE NOT is_replaced AND example_id != '' "
            f"GROUP BY environment, example_id) AS r{at}"
        )
    others = "".join(f" JOIN {one} USING (environment, example_id)" for one in tables[1:])
    source = tables[0] + others
    columns = [f'r{at}."{name}"' for at in range(len(runs)) for name in _OF_EXAMPLE]
    means = ", ".join(f"r{at}.mean" for at in range(len(runs)))
    where = "WHERE environment IN (SELECT unnest(?))" if asked.environment else ""
    sql = (
        f"SELECT environment, example_id, {', '.join(columns)} FROM {source} {where} "
        f"ORDER BY greatest({means}) - least({means}) DESC NULLS LAST, environment, example_id "
        f"LIMIT {asked.limit}"
    )
    return database.rows(sql, [asked.environment] if asked.environment else [])


def _example(runs: Sequence[OneRun], row: Sequence[Any]) -> JsonObject:
    environment, example_id = row[:2]
    width = len(_OF_EXAMPLE)
    sides: JsonObject = {}
    for at, run in enumerate(runs):
        count, mean, *key = row[2 + width * at : 2 + width * (at + 1)]
        sides[run.key] = {
            **{"count": count, "mean": mean},
            "address": run.address("examples", environment, example_id),
            "side": "/".join(map(escaped_part, (run.key, *key))),
        }
    return {"environment": environment, "example_id": example_id, "runs": sides}


def difference_page(runs: Runs, asked: DifferenceParameters) -> JsonObject:
    """Return both rollouts, and the settings in which their runs differ."""
    left, right = (_side(runs, name, getattr(asked, name)) for name in ("left", "right"))
    of_sides = {"left": left[0], "right": right[0]}
    settings, _ = differing(
        {side: run.config() for side, run in of_sides.items()},
        {side: run.settings_origin().defaults for side, run in of_sides.items()},
    )
    return {
        "page": "difference",
        "left": left[1],
        "right": right[1],
        "settings": [one._asdict() for one in settings],
    }


def _side(runs: Runs, name: str, text: str) -> tuple[OneRun, JsonObject]:
    parts = [unquote(part) for part in text.split("/")]
    if len(parts) != 4:
        raise ParameterError(f"{name}: expected RUN/GROUP/INDEX/ATTEMPT, got {text!r}")
    run = runs.get(parts[0])
    key = key_of(*parts[1:])
    run.index.refresh()
    row = row_at(run, queries.place_of(run.index, *key), with_tokens=False)
    return run, {
        "run": run.brief(),
        "row": scalars(row),
        "messages": messages_json(row.messages),
        "address": run.address("rollouts", *key),
    }
