"""`/runs/{run}`: identity, curves, rewards with intervals, health, evals and self-tests."""

from collections.abc import Collection, Sequence
from typing import Any

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.bands import band
from telescope_ui.base.curves import shared_curves, thinned
from telescope_ui.base.parameters import OverviewParameters
from telescope_ui.files.run_files import folders
from telescope_ui.index.one_run import OneRun, settings_of
from telescope_ui.pages.checkpoints import SmallFiles, checkpoints
from telescope_ui.pages.diagnoses import diagnoses
from telescope_ui.pages.health import tiles

USUAL = (
    *("task_reward/mean", "reward/mean", "entropy", "loss/total", "grad_norm"),
    *("completion_len/mean", "truncated/fraction", "mismatch/mean", "staleness/mean"),
    *("time/step_s", "tokens/rollout_per_s"),
)
"""Metrics that are shown where none is asked for, with all terms of the loss."""
_INDEX_WAIT_S = 0.1
"""Most of the page does not need the index."""


def overview_page(run: OneRun, asked: OverviewParameters) -> JsonObject:
    """Return the overview of a run."""
    names = run.metrics.names()
    chosen = asked.metric or usual(names)
    columns = run.metrics.columns(chosen, first=asked.first, last=asked.last)
    index = run.index.refresh(_INDEX_WAIT_S)
    small = SmallFiles(run.path)
    return {
        "page": "overview",
        "run": run.brief(),
        "identity": _identity(run),
        "metric_names": names,
        "curves": shared_curves(columns.steps, columns.values, points=asked.points),
        "rewards": _rewards(run, asked),
        "tiles": tiles(run),
        "diagnoses": diagnoses(run, names),
        "restarts": restarts(run),
        "eval_points": eval_points(run),
        "self_tests": (small.read("self_tests.json") or {}).get("tests", []),
        "checkpoints": checkpoints(run, small),
        "summary": small.read("summary.json"),
        "index": index,
        "problems": [
            *run.metrics.problems(),
            *run.line_problems(),
            *small.problems,
        ],
    }


def usual(names: Collection[str]) -> list[str]:
    """Return which of the metrics `names` are shown where none is asked for."""
    terms = sorted(name for name in names if name.startswith("loss/") and name not in USUAL)
    at = USUAL.index("loss/total") + 1
    return [name for name in (*USUAL[:at], *terms, *USUAL[at:]) if name in names]


def _identity(run: OneRun) -> JsonObject:
    info = run.info()
    known = ("started_at", "ended_at", "reason", "host", "pid", "python", "platform", "versions")
    return {
        **{name: getattr(info, name) for name in known},
        "resumes": [one.model_dump() for one in info.resumes],
        "step": run.metrics.last_step(),
        **settings_of(run),
        "last_change_s": run.changed_s(),
        "folder": str(run.opened),
    }


def _rewards(run: OneRun, asked: OverviewParameters) -> list[JsonObject]:
    """Return the reward of each environment over steps, with its interval over groups."""
    sql = (
        "SELECT environment, step, count(*), avg(mean), var_pop(mean) FROM {groups} "
        "WHERE (? IS NULL OR step >= ?) AND (? IS NULL OR step <= ?) "
        "GROUP BY environment, step ORDER BY environment, step"
    )
    values = [asked.first, asked.first, asked.last, asked.last]
    by_environment: dict[str, list[tuple[Any, ...]]] = {}
    for row in run.index.rows(sql, values):
        by_environment.setdefault(row[0], []).append(row[1:])
    ranges = run.info().reward_ranges
    return [
        _reward(name, rows, asked.points, ranges.get(name)) for name, rows in by_environment.items()
    ]


def _reward(
    name: str,
    rows: Sequence[tuple[Any, ...]],
    points: int,
    reward_range: tuple[float, float] | None,
) -> JsonObject:
    means = [row[2] for row in rows]
    kept = thinned([means], len(rows), points=points)
    found = [rows[at] for at in kept.positions]
    bands = [band(num, mean, spread, reward_range) for _, num, mean, spread in found]
    return {
        "environment": name,
        "steps": [row[0] for row in found],
        "mean": [row[2] for row in found],
        "low": [one.low for one in bands],
        "high": [one.high for one in bands],
        "num_groups": [row[1] for row in found],
        "is_thinned": kept.is_thinned,
    }


def restarts(run: OneRun) -> list[JsonObject]:
    """Return when trainer ranks were started again."""
    return run.restarts.rows()


def eval_points(run: OneRun) -> list[JsonObject]:
    """Return what became of each eval, with the folder that it is in, if it is there."""
    there = {path.name for path in folders(run.path, "evals")}
    found: list[JsonObject] = []
    for point in run.eval_points.rows():
        # Older runs recorded no folder, and named it so where the name of the eval allowed it.
        folder = point.get("folder") or f"{point.get('name')}-{point.get('tag')}"
        found.append({**point, "folder": folder if folder in there else None})
    return found


def server_events(run: OneRun) -> list[JsonObject]:
    """Return what happened to servers, oldest first; lines without a time are left out."""
    rows = run.server_events.rows()
    return [_complete(row) for row in rows if isinstance(row.get("time_s"), int | float)]


def _complete(row: JsonObject) -> JsonObject:
    """Return a line of `servers.jsonl` with every field of its schema."""
    fields = {"server": "", "role": "", "life": 1, "state": "", "version": None, "reason": ""}
    return {**fields, **row}
