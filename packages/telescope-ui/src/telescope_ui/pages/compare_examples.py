"""`/compare/examples`: examples that several runs trained on, with the largest differences."""

from collections.abc import Sequence
from typing import Any

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.parameters import CompareExamplesParameters
from telescope_ui.files.database import Database
from telescope_ui.index.one_run import OneRun, escaped_part

_OF_RUN = ("environment", "example_id", "count", "mean", "group_id", "index", "attempt")


def compare_examples_page(
    runs: Sequence[OneRun], database: Database, asked: CompareExamplesParameters
) -> JsonObject:
    """Return the examples that all of `runs` have, those with the largest difference first."""
    states = [run.index.refresh() for run in runs]
    found = {run.key: run for run in runs}
    rows = _rows(runs, database, asked) if len(found) > 1 else []
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


def _rows(
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
    columns = [f'r{at}."{name}"' for at in range(len(runs)) for name in _OF_RUN[2:]]
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
    width = len(_OF_RUN) - 2
    sides: JsonObject = {}
    for at, run in enumerate(runs):
        count, mean, *key = row[2 + width * at : 2 + width * (at + 1)]
        sides[run.key] = {
            **{"count": count, "mean": mean},
            "address": run.address("examples", environment, example_id),
            "side": "/".join(map(escaped_part, (run.key, *key))),
        }
    return {"environment": environment, "example_id": example_id, "runs": sides}
